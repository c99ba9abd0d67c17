"""Real weights through our convolutions: the HiFi-GAN of a Piper voice, channels last, against plain torch and fp64."""

import copy
import warnings

import joe_voice
import pytest
import torch
from joe_voice import LAST_SLOPE, SLOPE

from voxfuse.fusions._stages import mean_activated
from voxfuse.fusions.polyphase import factor, unsupported, upsample
from voxfuse.kernels._conv_plan import FIRST, FIRST_2, FIRST_4, LAST, LAST_2
from voxfuse.kernels._op import REFERENCE, Run
from voxfuse.kernels._phases import PLAIN, to_phases
from voxfuse.kernels.conv1d import (
    conv_unsupported,
    convolved,
    convolved_plain,
    layout_for,
    packed_weight,
    planned,
)
from voxfuse.kernels.snake import snake

OUT_CHANNELS = 8  # of conv_post: its one filled up, as HiFT's 18 are
PLANS = [FIRST, LAST, FIRST_2, LAST_2, FIRST_4]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(autouse=True)
def plain_sums():
    """On a CPU without oneDNN: its channels-last convolutions alone are three times as far from fp64 as its others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TF32 of Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def channels_last(model, latents, run, lengths=None, plan=None):
    """The generator from what HiFT's decoder is made of: latents [rows, 192, frames] → [rows, 1, samples]."""

    def convolution(conv, x, residual=None):
        rows, frames, _ = x.shape
        chosen, layout = planned(conv, rows, frames) if plan is None else (plan, layout_for(conv, plan, frames))
        y = convolved(conv, to_phases(x, *layout), chosen)
        y, _ = snake(y, conv.bias, residual, None, lengths, frames, conv.dilation[0], *PLAIN, True, run=run)
        return y

    x, _ = snake(latents.transpose(1, 2), None, None, None, lengths, latents.shape[2], 1, *PLAIN, True, run=run)
    parts = [convolution(model.conv_pre, x)]
    for stage, up in enumerate(model.ups):
        x = upsample(up, mean_activated(parts, lengths, SLOPE, run))
        lengths = None if lengths is None else lengths * factor(up)
        x, _ = snake(x, up.bias, None, None, lengths, x.shape[1], 1, *PLAIN, True, run=run)
        parts = []
        for block in model.blocks_of(stage):
            y = x
            for conv in block.convs:
                y = convolution(conv, mean_activated([y], lengths, SLOPE, run), y)
            parts.append(y)
    post = packed_weight(model.conv_post, out_channels=OUT_CHANNELS)
    x = convolved_plain(model.conv_post, mean_activated(parts, lengths, LAST_SLOPE, run), post, "taps_first")
    return torch.tanh(x[:, :, :1].transpose(1, 2))


def relative_rms(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


def assert_within_contract(model, latents, run, plan=None):
    exact = copy.deepcopy(model).double()(latents.double())
    assert 0.01 < exact.abs().max() < 1  # it speaks
    eager = relative_rms(model(latents), exact)
    assert relative_rms(channels_last(model, latents, run, plan=plan), exact) <= max(1.25 * eager, 2**-23)


def test_the_generator_is_the_onnxs():
    latents, audio = joe_voice.spoken()
    ours = joe_voice.generator()(latents)
    assert ours.shape == audio.shape and relative_rms(ours, audio.double()) < 1e-5


def test_a_spoken_sentence_is_within_the_contract():
    latents, _ = joe_voice.spoken()
    assert_within_contract(joe_voice.generator(normalised=True), latents[:, :, 20:50], REFERENCE)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_folds_and_convolves_real_weights(plan):
    model = joe_voice.generator(normalised=True)
    for part in model.modules():
        if hasattr(part, "kernel_size"):
            assert (unsupported if part in [*model.ups] else conv_unsupported)(part) is None
    assert_within_contract(model, torch.randn(2, joe_voice.LATENT_CHANNELS, 9), REFERENCE, plan)


def test_the_kernels_interpreted(poisoned_empty):
    assert_within_contract(
        joe_voice.generator(), torch.randn(1, joe_voice.LATENT_CHANNELS, 3), Run("interpreter", "joe interpreted")
    )


def test_rows_of_mixed_lengths_end_as_alone():
    model, lengths = joe_voice.generator(), [5, 17, 1]
    latents = torch.randn(3, joe_voice.LATENT_CHANNELS, 17)
    together = channels_last(model, latents, REFERENCE, torch.tensor(lengths))
    for row, (length, audio) in enumerate(zip(lengths, together, strict=True)):
        alone = model(latents[row : row + 1, :, :length])[0]
        assert relative_rms(audio[:, : 256 * length], alone.double()) < 1e-5


@pytest.mark.parametrize(
    ("rows", "frames"), [pytest.param(*shape, marks=gpu) for shape in ((1, 87), (4, 301), (16, 40))]
)
@pytest.mark.parametrize("plan", [None, *PLANS])
def test_on_a_gpu(rows, frames, plan):
    model = joe_voice.generator(normalised=True).cuda()
    latents = torch.randn(rows, joe_voice.LATENT_CHANNELS, frames, device="cuda")
    assert_within_contract(model, latents, Run("triton", "joe"), plan)
