"""Pairs of convolutions as one kernel in Snake blocks and HiFT on a Hopper GPU, at the released shapes with random
weights, against fp64: with TF32 allowed, as upstream's convolutions are by default."""

import copy

import hift_classes
import pytest
import torch

import voxfuse
from voxfuse.fusions.hift import decode
from voxfuse.fusions.hift_graph import Runners
from voxfuse.fusions.snake_conv_block import run_block, runs_pairs, snake_block
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.snake_conv_pair import _pair_kernel, packed_pair, snake_conv_pair

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")]
PER_FRAME = 480
# Of twelve blocks of three pairs, those of 64 channels (3, 7, 11 taps; 11 of the source) and one of 128 (3 taps).
DECODE_CALLS = 2 + 2 + 7 * 7 + 5 * 3 + 2 * 3 + 4


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


@pytest.fixture(scope="module")
def hift(stack):
    return hift_classes.released(stack)


@pytest.fixture(scope="module")
def double(hift):
    double = copy.deepcopy(hift).double()
    double.stft_window = double.stft_window.double()
    return double


@pytest.fixture
def counted(request):
    run = Run("triton", request.node.nodeid)
    return run, TALLIES.of(run.receipt)


def inputs(frames, rows=1):
    source = 0.1 * torch.sin(torch.arange(frames * PER_FRAME, device="cuda") * 0.04)
    return torch.randn(rows, 80, frames, device="cuda"), source + 0.02 * torch.randn(
        rows, 1, frames * PER_FRAME, device="cuda"
    )


def relative_rms(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


def as_precise(errors):
    """Pairs of (eager, fused) pooled, by the contract."""
    eager, fused = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert fused <= max(1.25 * eager, 2**-23), errors


def test_decode_is_as_precise_as_upstream(hift, double, counted, poisoned_empty):
    run, tally = counted
    errors = []
    for frames, rows in ((100, 1), (37, 3), (3, 33), (250, 1)):
        mel, source = inputs(frames, rows)
        exact = double.decode(x=mel.double(), s=source.double())
        before = tally.calls
        fused = decode(hift, mel, source, None, run)
        assert (tally.calls - before, dict(tally.fallbacks)) == (DECODE_CALLS, {})
        errors.append([relative_rms(value, exact) for value in (hift.decode(x=mel, s=source), fused)])
    as_precise(errors)


def test_rows_of_mixed_lengths_with_nan_behind_them(hift, double, counted, poisoned_empty):
    run, tally = counted
    lengths = [80, 3, 41, 64, 1]
    mel, source = inputs(80, len(lengths))
    for row, length in enumerate(lengths):
        mel[row, :, length:] = torch.nan
        source[row, :, length * PER_FRAME :] = torch.nan
    audio = decode(hift, mel, source, torch.tensor(lengths, device="cuda"), run)
    assert (tally.calls, dict(tally.fallbacks)) == (DECODE_CALLS, {})
    exact, eager, fused = [], [], []
    for row, length in enumerate(lengths):
        one = mel[row : row + 1, :, :length], source[row : row + 1, :, : PER_FRAME * length]
        exact.append(double.decode(*(part.double() for part in one)))
        eager.append(hift.decode(*one))
        fused.append(audio[row : row + 1, : PER_FRAME * length])
        assert relative_rms(fused[-1], exact[-1]) < 0.02
        assert torch.all(audio[row, PER_FRAME * length :] == 0)
    # of all samples together: cuDNN may take the shortest rows without TF32
    as_precise([[relative_rms(torch.cat(values, 1), torch.cat(exact, 1)) for values in (eager, fused)]])


def test_a_graph_takes_the_same_way(hift, double, counted):
    run, tally = counted
    graphs, errors = Runners(run, "first_use"), []
    for frames in (100, 37):
        mel, source = inputs(frames, 2)
        before = tally.calls
        replayed = graphs.decode(hift, mel, source)
        assert not isinstance(replayed, str), replayed
        assert (tally.calls - before, dict(tally.fallbacks)) == (DECODE_CALLS, {})
        exact = double.decode(x=mel.double(), s=source.double())
        errors.append([relative_rms(value, exact) for value in (hift.decode(mel, source), replayed)])
        assert torch.equal(graphs.decode(hift, mel, source), replayed), "a replay differs from itself"
    as_precise(errors)


def test_blocks_patched_by_class(hift, double, stack):
    errors = []
    for frames in (60, 100, 250):
        mel, source = inputs(frames)
        exact, eager = double.decode(mel.double(), source.double()), hift.decode(mel, source)
        with voxfuse.apply_patches(stack, include=["snake_conv_block"], policy="all") as patches:
            fused = hift.decode(mel, source)
            (receipt,) = (r for r in patches.receipts if r.fusion == "snake_conv_block" and r.status == "applied")
        fewest = 7 * 7 + 5 * 3
        assert fewest <= receipt.calls <= fewest + 5 and not receipt.fallbacks, "at most one copy a block"
        errors.append([relative_rms(value, exact) for value in (eager, fused)])
    as_precise(errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("channels", "taps"), [(64, 3), (64, 7), (64, 11), (128, 3)])
def test_blocks_of_few_frames_and_many_rows(stack, channels, taps, dtype, counted, poisoned_empty):
    """One frame, ends of a tile, more rows than a batch; in channels first, as the patch gets them."""
    causal = {"causal": True} if stack == "cosyvoice3" else {}
    block = hift_classes.upstream(stack).ResBlock(channels, taps, [1, 3, 5], **causal).eval().cuda()
    for name, parameter in block.named_parameters():
        if name.endswith("alpha"):
            parameter.uniform_(0.3, 3)
    exact_block, block = copy.deepcopy(block).to(dtype).double(), block.to(dtype)
    errors = []
    for rows, frames in ((33, 1), (1, 2), (2, 254), (3, 257), (1, 1003), (33, 64)):
        x = torch.randn(rows, channels, frames, device="cuda", dtype=dtype)
        exact, fused = exact_block(x.double()), run_block(block, x, counted[0])
        assert relative_rms(fused, exact) < (0.03 if dtype == torch.bfloat16 else 0.004)
        if frames > 2:  # cuDNN may take so few without TF32
            errors.append([relative_rms(value, exact) for value in (block(x), fused)])
    as_precise(errors)
    assert (counted[1].calls, dict(counted[1].fallbacks)) == (6 * (1 + 3), {})


def test_tf32_switched_off_between_calls_is_respected(stack, counted, monkeypatch):
    """Calls that were remembered too: the block goes back to its chain, the kernel by itself to its reference."""
    causal = {"causal": True} if stack == "cosyvoice3" else {}
    block, (run, tally) = hift_classes.upstream(stack).ResBlock(64, 3, [1, 3, 5], **causal).eval().cuda(), counted
    x = torch.randn(2, 500, 64, device="cuda")
    weights = torch.randn(2, 64, 3, 64, device="cuda") / 14
    pair = x, weights, packed_pair(weights), *torch.rand(4, 64, device="cuda").unbind(), None, 1, 1, 1
    for _ in range(4):
        snake_block(block, x, None, run)
        snake_conv_pair(*pair, run=run)
    assert (tally.calls, dict(tally.fallbacks)) == (4 * (3 + 1), {})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    y = snake_block(block, x, None, run)
    assert (tally.calls, dict(tally.fallbacks)) == (4 * (3 + 1) + 7, {})
    exact = copy.deepcopy(block).double()(x.transpose(1, 2).double()).transpose(1, 2)
    assert relative_rms(y, exact) < 1e-5
    snake_conv_pair(*pair, run=run)
    (reason,) = tally.fallbacks
    assert "allow_tf32" in reason


def test_a_block_is_one_compilation_with_lengths_and_one_without(stack, counted):
    """Whatever its lengths, rows and dilations."""

    def variants():
        return len(_pair_kernel.device_caches[torch.cuda.current_device()][0])

    causal = {"causal": True} if stack == "cosyvoice3" else {}
    block = hift_classes.upstream(stack).ResBlock(64, 7, [1, 3, 5], **causal).eval().cuda()
    before = variants()
    for rows, frames in ((1, 2), (1, 1000), (2, 1024), (3, 4097), (16, 333)):
        x = torch.randn(rows, frames, 64, device="cuda")
        assert runs_pairs(x, counted[0])
        for lengths in (None, torch.full((rows,), frames, device="cuda")):
            snake_block(block, x, lengths, counted[0])
    assert variants() - before <= 2 and not counted[1].fallbacks
