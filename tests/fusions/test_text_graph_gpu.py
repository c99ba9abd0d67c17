"""The text graph on a GPU: KModel at the released shapes with random weights, replayed, against upstream's code."""

import importlib.util
import threading

import pytest
import torch
from kmodels import RELEASED, random_kmodel

import voxfuse
from voxfuse.fusions.graph_runner import capturing, runners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent"),
]

COUNTS = (3, 130, 8, 57, 200, 4, 16, 101, 33, 64, 9, 150)


class Listener(torch.nn.Module):
    """In the decoder's place: remembers what it is given, as (asr, F0, N)."""

    def forward(self, asr, f0, energy, style):
        self.heard = asr, f0, energy
        return torch.zeros(1, 1, 8, device=asr.device)


@pytest.fixture
def model(tmp_path):
    model = random_kmodel(tmp_path, RELEASED, spread=4)
    model.predictor.duration_proj.linear_layer.bias.data.fill_(-2.75)  # four or five frames a token
    model.decoder = Listener()
    return model.cuda()


@pytest.fixture
def exact_fp32(monkeypatch):
    """Without TF32, which another shape of batch may round elsewhere; a duration near .5 frames would then flip."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def utterance(count, seed=0):
    random = torch.Generator("cuda").manual_seed(1000 * seed + count)
    ids = torch.randint(1, 178, (1, count), device="cuda", generator=random)
    return ids, torch.randn(1, 256, device="cuda", generator=random)


def speak(model, count):
    _, durations = model.forward_with_tokens(*utterance(count))
    return durations, *model.decoder.heard


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_same_speech(spoken, expected):
    assert torch.equal(spoken[0], expected[0]), "durations differ"
    for value, other in zip(spoken[1:], expected[1:], strict=True):
        assert value.shape == other.shape and relative_rms(value, other) < 1e-4


def patched(model):
    return voxfuse.apply_patches(model, include=["text_graph"], policy="all", strict=True)


def statistics(model):
    return {name: next(r.statistics for r in runners(model) if r.owner is owner)
            for name, owner in (("tokens", model), ("frames", model.predictor))}  # fmt: skip


def test_replays_of_interleaved_lengths_speak_as_upstream(model, exact_fp32):
    expected = {count: speak(model, count) for count in COUNTS}
    assert max(durations.sum() for durations, *_ in expected.values()) <= 2048
    with patched(model) as patches:
        with capturing():
            for count in COUNTS:
                assert_same_speech(speak(model, count), expected[count])
        captures = {name: kept.captures for name, kept in statistics(model).items()}
        for count in sorted(COUNTS) + list(COUNTS):
            assert_same_speech(speak(model, count), expected[count])
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "text_graph")
        assert not receipt.fallbacks and receipt.calls >= 3 * len(COUNTS)
        for name, kept in statistics(model).items():
            assert (kept.captures, kept.recaptures, kept.replays) == (captures[name], 0, 3 * len(COUNTS))


def test_upstreams_own_calls_between_replays_leave_the_graphs_valid(model, exact_fp32):
    """Every one flattens the weights of the LSTMs anew: they move."""
    expected = speak(model, 40)
    with patched(model) as patches, capturing():
        speak(model, 40)
        place = model.text_encoder.lstm.weight_ih_l0.data_ptr()
        with patches.paused():
            assert_same_speech(speak(model, 40), expected)
        filler = [torch.full_like(weight, 9.0) for weight in model.text_encoder.lstm.parameters()]  # where they were
        assert_same_speech(speak(model, 40), expected)
        moved = model.text_encoder.lstm.weight_ih_l0.data_ptr() != place
        assert all(kept.recaptures == 0 for kept in statistics(model).values()), f"weights moved: {moved}"
        with torch.no_grad():
            model.predictor.lstm.weight_hh_l0.mul_(-1)
        with patches.paused():
            expected = speak(model, 40)
        assert_same_speech(speak(model, 40), expected)
        assert statistics(model)["tokens"].recaptures == 1
        del filler


def test_a_new_length_is_captured_while_another_thread_speaks(model, exact_fp32):
    expected = {count: speak(model, count) for count in (50, 70, 90)}
    stop, faults, spoken = threading.Event(), [], []

    def go_on():
        try:
            while not stop.is_set():
                assert_same_speech(model.forward_with_tokens(*utterance(50))[1:], expected[50][:1])
                spoken.append(True)
        except BaseException as error:  # reported by the test
            faults.append(error)

    with patched(model) as patches:
        with capturing():
            speak(model, 50)
        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            with capturing():
                for count in (70, 90):
                    assert torch.equal(model.forward_with_tokens(*utterance(count))[1], expected[count][0])
        finally:
            stop.set()
            thread.join()
        assert not faults and spoken
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "text_graph")
        assert not receipt.fallbacks, "a call of either thread was not replayed"
        for count in (70, 90):
            assert_same_speech(speak(model, count), expected[count])


@torch.no_grad()
def test_errors_are_those_of_the_eager_chain(model, tmp_path):
    """With TF32 as torch allows it: both against fp64, pooled over lengths, each stage on the same inputs."""
    double = random_kmodel(tmp_path, RELEASED)
    double.decoder = Listener()
    double.load_state_dict(model.state_dict())
    double = double.double().cuda()
    errors = []
    with patched(model), capturing():
        for count in COUNTS:
            ids, ref_s = utterance(count)
            model.forward_with_tokens(ids, ref_s)
            by_owner = {runner.owner: runner for runner in runners(model)}
            style = ref_s[:, 128:]
            en = torch.randn(1, 640, 4 * count, device="cuda")
            replayed = (
                *by_owner[model](ids.float(), style).split([640, 512, 1], dim=1),
                *by_owner[model.predictor](en, style).unbind(1),
            )
            eager = upstream_stages(model, ids, style, en)
            torch.set_default_dtype(torch.float64)  # TextEncoder and DurationEncoder make zeros of the default type
            try:
                oracle = upstream_stages(double, ids, style.double(), en.double())
            finally:
                torch.set_default_dtype(torch.float32)
            errors.append([[relative_rms(v, o) for v, o in zip(arm, oracle, strict=True)] for arm in (eager, replayed)])
    pooled = torch.tensor(errors).square().mean(0).sqrt()  # [arm, part: d, t_en, durations, F0, N]
    assert torch.all(pooled[1] <= (1.25 * pooled[0]).clamp(min=2**-23)), f"eager {pooled[0]}, replayed {pooled[1]}"


def upstream_stages(model, ids, style, en):
    """d, t_en and durations of KModel.forward_with_tokens by its modules, F0 and N of F0Ntrain."""
    lengths = torch.full((1,), ids.shape[1], device="cuda")
    mask = torch.zeros(ids.shape, dtype=torch.bool, device="cuda")
    d_en = model.bert_encoder(model.bert(ids, attention_mask=(~mask).int())).transpose(-1, -2)
    d = model.predictor.text_encoder(d_en, style, lengths, mask)
    durations = torch.sigmoid(model.predictor.duration_proj(model.predictor.lstm(d)[0])).sum(axis=-1)
    t_en = model.text_encoder(ids, lengths, mask)
    return d.transpose(-1, -2), t_en, durations.unsqueeze(1), *model.predictor.F0Ntrain(en, style)
