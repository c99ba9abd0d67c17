"""The gate's own test: it refuses every fault planted in real Kokoro, and accepts Snake rewritten correctly.

Word error rate does not see all of these (a wrong dilation reads at the same WER), so the fidelity tier must.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from tone_gate import failed, silent

from voxfuse.e2e.asr import WhisperTranscriber
from voxfuse.e2e.gate import generate
from voxfuse.e2e.protocol import load_protocol
from voxfuse.e2e.score import score
from voxfuse.e2e.stacks import driver
from voxfuse.e2e.texts import load_texts
from voxfuse.records import Receipt

pytestmark = [pytest.mark.weights, pytest.mark.slow]

Plant = Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]


class Planted:
    """A patch set that plants one change in the running model."""

    def __init__(self, model: torch.nn.Module, plant: Plant) -> None:
        self._model, self._plant = model, plant
        self._planted = 0
        self._on()

    def _on(self) -> None:
        self._planted += 1
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._plant(self._model))

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        same = {"fusion": "planted", "stack": "kokoro", "target": "planted", "count": 1, "status": "applied"}
        return (Receipt(calls=self._planted, process_id=os.getpid(), **same),)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.revert()
        try:
            yield
        finally:
            self._on()

    def revert(self) -> None:
        self._stack.close()


def resblock(snake: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Plant:
    """The generator's residual blocks with another Snake."""

    def forward(self, x, s):
        parts = (self.convs1, self.convs2, self.adain1, self.adain2, self.alpha1, self.alpha2)
        for conv1, conv2, norm1, norm2, alpha1, alpha2 in zip(*parts, strict=True):
            inner = conv1(snake(norm1(x, s), alpha1))
            x = conv2(snake(norm2(inner, s), alpha2)) + x
        return x

    return lambda _model: mock.patch("kokoro.istftnet.AdaINResBlock1.forward", forward)


@contextlib.contextmanager
def dilation_4_for_5(model):
    convolution = model.decoder.generator.resblocks[3].convs1[2]
    assert convolution.dilation == (5,) and convolution.kernel_size == (3,)
    with mock.patch.multiple(convolution, dilation=(4,), padding=(4,)):
        yield


@contextlib.contextmanager
def lstm_gates_swapped(model):
    def swap():
        for name, weight in model.text_encoder.lstm.named_parameters():
            gates = weight.view(4, -1, *weight.shape[1:])
            assert name.split("_")[0] in ("weight", "bias")
            gates[[0, 1]] = gates[[1, 0]].clone()

    with torch.no_grad():
        swap()
    try:
        yield
    finally:
        with torch.no_grad():
            swap()


def phase_negated(_model):
    from kokoro.istftnet import TorchSTFT

    upstream = TorchSTFT.inverse
    return mock.patch.object(TorchSTFT, "inverse", lambda self, magnitude, phase: upstream(self, magnitude, -phase))


def gamma_for_one_plus_gamma(_model):
    def forward(self, x, s):
        gamma, beta = self.fc(s).unsqueeze(-1).chunk(2, dim=1)
        return gamma * self.norm(x) + beta

    return mock.patch("kokoro.istftnet.AdaIN1d.forward", forward)


def one_draw_too_many(model):
    upstream = type(model).forward

    def forward(self, *args, **kwargs):
        torch.rand(1)
        return upstream(self, *args, **kwargs)

    return mock.patch.object(type(model), "forward", forward)


FAULTS: dict[str, Plant] = {
    "dilation 4 for 5 in one convolution": dilation_4_for_5,
    "Snake without 1/alpha": resblock(lambda x, alpha: x + torch.sin(alpha * x) ** 2),
    "LSTM gates i and f swapped": lstm_gates_swapped,
    "iSTFT phase negated": phase_negated,
    "Snake dropped": resblock(lambda x, alpha: x),
    "AdaIN gamma for 1 + gamma": gamma_for_one_plus_gamma,
    "noise drawn out of step": one_draw_too_many,
}


@pytest.fixture(scope="module")
def kokoro():
    stack = driver("kokoro")
    stack.load("cpu")
    return stack


@pytest.fixture(scope="module")
def texts():
    """Two short sentences, of more than a word or two."""
    return sorted((text for text in load_texts() if len(text.text) >= 20), key=lambda text: len(text.text))[:2]


def judged(kokoro, texts, plant, path):
    run = generate(
        kokoro,
        lambda _left_out: Planted(kokoro.model, plant),
        load_protocol("smoke", sentences=len(texts)),
        texts,
        path,
        silent,
        device="cpu",
        backend="reference",
    )
    return score(run, WhisperTranscriber(), silent)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_refused_by_fidelity(kokoro, texts, fault, tmp_path):
    verdict = judged(kokoro, texts, FAULTS[fault], tmp_path / "run")
    assert verdict.verdict == "fail"
    assert failed(verdict) >= {"fidelity, worst"}


def test_a_correct_rewrite_of_snake_is_accepted(kokoro, texts, tmp_path):
    rewritten = resblock(lambda x, alpha: torch.addcmul(x, torch.sin(x * alpha).square(), alpha.reciprocal()))
    verdict = judged(kokoro, texts, rewritten, tmp_path / "run")
    assert failed(verdict) == set()
    outcomes = {guard.name: guard.outcome for guard in verdict.guards}
    assert outcomes["fidelity, worst"] == outcomes["fidelity, median SNR"] == outcomes["WER ceiling"] == "pass"
    assert outcomes["fidelity, median log-spectrum L1"] == "pass"
    assert all(item.baseline.audio_sha256 != item.patched.audio_sha256 for item in verdict.utterances)
    assert min(item.snr_db for item in verdict.utterances) > 80


def test_the_untouched_model_is_left_untouched(kokoro, texts):
    before = kokoro.synthesize(texts[0], 1).audio
    for plant in FAULTS.values():
        Planted(kokoro.model, plant).revert()
    assert (kokoro.synthesize(texts[0], 1).audio == before).all()
