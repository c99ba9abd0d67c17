"""The length-aware HiFT decoder on the real classes of every stack (hift_classes), against the untouched module."""

import copy

import hift_classes
import pytest
import torch

from voxfuse.fusions.hift import decode, fault, samples_per_frame
from voxfuse.kernels._op import TALLIES, Run

CLOSE = 1e-5  # relative RMS: fp32 roundings amplified by exp; a tail that leaks is above 1e-3
REFERENCE = Run("reference", "hift test")

pytestmark = pytest.mark.filterwarnings("ignore:.*window was not provided.*")


@pytest.fixture(params=hift_classes.MODULES)
def hift(request):
    return hift_classes.generator(request.param)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def inputs(hift, rows, frames):
    samples = frames * samples_per_frame(hift)
    mel = torch.randn(rows, hift.conv_pre.in_channels, frames)
    return mel, 0.1 * torch.sin(torch.arange(samples) * 0.04) + 0.02 * torch.randn(rows, 1, samples)


def oracle(hift, mel, source):
    double = copy.deepcopy(hift).double()
    double.stft_window = double.stft_window.double()
    return double.decode(x=mel.double(), s=source.double())


def padded(tensor, size, fill):
    """The last axis extended by what must not matter."""
    return torch.cat([tensor, torch.full((*tensor.shape[:-1], size - tensor.shape[-1]), fill)], dim=-1)


def relative_rms(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


def padded_call(hift, mel, source, bucket, fill, run):
    """The waveform from tensors padded to a bucket, cut to length, and the rest of it."""
    frames, per_frame = mel.shape[2], samples_per_frame(hift)
    mel, source = padded(mel, bucket, fill), padded(source, bucket * per_frame, fill)
    audio = decode(hift, mel, source, torch.tensor([frames]), run)
    return audio.split([frames * per_frame, (bucket - frames) * per_frame], dim=-1)


def test_small_and_released_generators_are_taken(hift):
    assert fault(hift) is None and samples_per_frame(hift) == 48


@pytest.mark.parametrize("stack", hift_classes.MODULES)
def test_the_released_configuration_is_taken(stack):
    hift = hift_classes.generator(stack, **hift_classes.RELEASED, in_channels=80)
    assert fault(hift) is None and samples_per_frame(hift) == 480
    mel, source = inputs(hift, 1, 3)
    assert relative_rms(decode(hift, mel, source, None, REFERENCE), oracle(hift, mel, source)) < CLOSE


def test_padded_buckets_equal_upstream_at_every_length(hift):
    """Errors against fp64 pooled over the lengths: a single utterance's are luck to a factor of two."""
    errors = []
    for frames in (1, 2, 3, 5, 8, 15, 16, 17, 31):
        mel, source = inputs(hift, 1, frames)
        baseline, expected = hift.decode(x=mel, s=source), oracle(hift, mel, source)
        exact = decode(hift, mel, source, None, REFERENCE)
        result, tail = padded_call(hift, mel, source, frames + 7, 0.0, REFERENCE)
        dirty, _ = padded_call(hift, mel, source, frames + 7, float("nan"), REFERENCE)
        assert result.shape == exact.shape == baseline.shape
        assert torch.all(tail == 0)
        assert torch.equal(result, dirty), "what lies behind the end changed the result"
        errors.append([relative_rms(value, expected) for value in (baseline, exact, result)])
    eager, exact, result = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert exact <= max(1.25 * eager, 2**-23) and result <= max(1.25 * eager, 2**-23), errors
    assert torch.tensor(errors).max() < CLOSE


def test_the_audio_is_clamped_and_magnitudes_are_clipped_as_upstream(hift):
    hift.conv_post.bias[: hift.istft_params["n_fft"] // 2 + 1] += 4.0
    mel, source = inputs(hift, 1, 6)
    expected = oracle(hift, mel, source)
    result = decode(hift, mel, source, None, REFERENCE)
    assert torch.sum(expected.abs() == 0.99) > 20
    assert relative_rms(result, expected) < CLOSE


def test_rows_of_mixed_lengths_equal_each_row_alone(hift):
    lengths = (9, 1, 16, 5, 2)
    mel, source = inputs(hift, len(lengths), 16)
    per_frame = samples_per_frame(hift)
    together = decode(hift, mel, source, torch.tensor(lengths), REFERENCE)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = mel[one, :, :length], source[one, :, : length * per_frame]
        for expected in (decode(hift, *alone, None, REFERENCE), hift.decode(x=alone[0], s=alone[1])):
            assert relative_rms(together[one, : length * per_frame], expected.double()) < CLOSE
        assert torch.all(together[row, length * per_frame :] == 0)


@pytest.mark.slow
def test_a_padded_bucket_through_the_kernels(hift, request):
    run = Run("interpreter", request.node.nodeid)
    mel, source = inputs(hift, 1, 3)
    expected = oracle(hift, mel, source)
    result, tail = padded_call(hift, mel, source, 4, float("nan"), run)
    assert relative_rms(result, expected) <= max(2 * relative_rms(hift.decode(x=mel, s=source), expected), 2**-22)
    assert torch.all(tail == 0)
    blocks = len(hift.resblocks) + len(hift.source_resblocks)
    stages = hift.num_upsamples
    assert TALLIES.of(run.receipt).calls == 2 + 2 + 7 * blocks + 2 * stages + (stages + 1)
    assert not TALLIES.of(run.receipt).fallbacks


def test_weight_norm_as_upstream_has_it_removed_or_of_the_old_kind(hift):
    mel, source = inputs(hift, 1, 4)
    baseline = hift.decode(x=mel, s=source)
    with torch.enable_grad():  # without, torch leaves the weight a plain tensor
        for name, part in list(hift.named_modules()):
            if torch.nn.utils.parametrize.is_parametrized(part):
                torch.nn.utils.parametrize.remove_parametrizations(part, "weight")
                if "convs1" in name:
                    with pytest.warns(FutureWarning):
                        torch.nn.utils.weight_norm(part)
    assert fault(hift) is None
    assert relative_rms(decode(hift, mel, source, None, REFERENCE), baseline.double()) < CLOSE


def test_new_weights_are_heard(hift):
    mel, source = inputs(hift, 1, 4)
    before = decode(hift, mel, source, None, REFERENCE)
    hift.resblocks[1].convs1[0].parametrizations.weight.original1.mul_(-1)
    hift.conv_pre.parametrizations.weight.original0.mul_(1.5)
    after = decode(hift, mel, source, None, REFERENCE)
    assert relative_rms(after, hift.decode(x=mel, s=source).double()) < CLOSE
    assert relative_rms(before, after.double()) > 1e-3


def test_parts_that_are_not_upstreams_are_named(hift):
    def broken(change):
        changed = copy.deepcopy(hift)
        change(changed)
        return fault(changed)

    def set_(path, name, value):
        def change(module):
            setattr(module.get_submodule(path), name, value)

        return change

    assert "linear alpha" in broken(set_("resblocks.0.activations1.0", "alpha_logscale", True))
    assert "reflected in front" in broken(set_("", "reflection_pad", torch.nn.ReflectionPad1d((2, 0))))
    assert "hooks" in broken(lambda m: m.conv_post.register_forward_hook(lambda *_: None))
    assert "hooks" in broken(lambda m: m.ups[1].register_forward_hook(lambda *_: None))
    expected = "padding in front" if hasattr(hift, "conv_pre_look_right") else "by its stride"
    assert expected in broken(set_("ups.0", "padding", (1,)))
    assert "window" in broken(set_("", "stft_window", torch.ones(8)))
    assert "blocks" in broken(lambda m: m.resblocks.append(copy.deepcopy(m.resblocks[0])))
