"""What HiFT's blocks and sources must survive, on the real classes: lengths, rows, odd values, moves after patching."""

import copy

import hift_classes
import pytest
import torch

import voxfuse

CLOSE = 1e-5


@pytest.fixture(params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


def block_of(stack, channels=4, taps=3, dilations=(1, 5)):
    settings = {"causal": True} if stack == "cosyvoice3" else {}
    block = hift_classes.upstream(stack).ResBlock(channels, taps, list(dilations), **settings).eval()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("alpha"):
                parameter.uniform_(0.3, 3)
    return block


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def patched(stack, call, backend="reference"):
    """What ``call`` gives with the blocks patched, and the block's receipt."""
    with torch.no_grad(), voxfuse.apply_patches(stack, policy="all", backend=backend) as patches:
        result = call()
        receipt = next(r for r in patches.receipts if r.fusion == "snake_conv_block" and r.status == "applied")
    return result, receipt


@pytest.mark.parametrize("frames", [1, 2, 15, 16, 17, 4095, 4096, 4097])
def test_lengths(stack, frames):
    block = block_of(stack)
    x = torch.randn(2, 4, frames)
    oracle = copy.deepcopy(block).double()(x.double()).detach()
    found, receipt = patched(stack, lambda: block(x))
    assert found.shape == x.shape and not receipt.fallbacks
    assert relative_rms(found, oracle) <= max(1.25 * relative_rms(block(x).detach(), oracle), 2**-22)


@pytest.mark.parametrize("frames", [1, 2, 15, 16, 17])
def test_lengths_through_the_kernels_on_poisoned_memory(stack, frames, poisoned_empty):
    block = block_of(stack)
    x = torch.randn(2, 4, frames)
    found, receipt = patched(stack, lambda: block(x), "interpreter")
    assert not receipt.fallbacks and relative_rms(found, block(x)) < CLOSE


def test_rows_1_to_33(stack):
    block = block_of(stack)
    x = torch.randn(33, 4, 9)
    alone = torch.cat([block(x[row : row + 1]) for row in range(33)]).detach()
    for rows in range(1, 34):
        found, _ = patched(stack, lambda: block(x[:rows]))  # noqa: B023
        assert relative_rms(found, alone[:rows]) < CLOSE


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "channels last"])
def test_layouts(stack, layout):
    block = block_of(stack)
    x = {
        "transposed": torch.randn(2, 17, 4).transpose(1, 2),
        "sliced": torch.randn(2, 8, 40)[:, ::2, 3:20],
        "expanded": torch.randn(1, 4, 17).expand(2, -1, -1),
        "channels last": torch.randn(2, 17, 4)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2),
    }[layout]
    found, receipt = patched(stack, lambda: block(x))
    assert relative_rms(found, block(x)) < CLOSE and not receipt.fallbacks


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize(("alpha", "scale"), [(0.0, 1), (1e-12, 1), (1e-6, 1), (1e-3, 100), (30.0, 1000)])
def test_alphas_near_zero_and_large_arguments(stack, backend, alpha, scale):
    block = block_of(stack, dilations=(1,))
    with torch.no_grad():
        for part in (*block.activations1, *block.activations2):
            part.alpha.fill_(alpha)
    x = scale * torch.randn(1, 4, 16)
    found, receipt = patched(stack, lambda: block(x), backend)
    assert found.isfinite().all() and not receipt.fallbacks
    assert relative_rms(found, copy.deepcopy(block).double()(x.double())) < 1e-3


def test_fp16_near_overflow_is_not_worse_than_upstream(stack):
    block = block_of(stack).half()
    x = (30_000 * torch.randn(1, 4, 16)).clamp(-60_000, 60_000).half()
    expected = block(x)
    found, _ = patched(stack, lambda: block(x))
    assert torch.all(found.isfinite() | ~expected.isfinite())


def test_another_type_after_patching(stack):
    """Packed weights follow ``.to``, and go back with it."""
    block, x = block_of(stack), torch.randn(1, 4, 17)
    expected, wide = block(x).detach(), copy.deepcopy(block).double()

    def call():
        first = block(x)
        block.to(torch.bfloat16)
        rough = block(x.bfloat16())
        block.to(torch.float32)
        return first, rough, block(x)

    (first, rough, back), receipt = patched(stack, call)
    assert relative_rms(first, expected) < CLOSE and rough.dtype == torch.bfloat16 and not receipt.fallbacks
    assert relative_rms(rough, wide(x.double())) < 0.03
    assert relative_rms(back, block(x)) < CLOSE


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_of_either_kind(stack, mode):
    block, x = block_of(stack), torch.randn(1, 4, 9)
    with mode(), voxfuse.apply_patches(stack, policy="all", backend="reference") as patches:
        block(x)
        receipt = next(r for r in patches.receipts if r.fusion == "snake_conv_block" and r.status == "applied")
    assert receipt.calls == 5 and not receipt.fallbacks


def test_an_empty_batch_ends_as_upstreams(stack):
    hift = hift_classes.generator(stack)
    mel, source = torch.zeros(0, hift_classes.BINS, 6), torch.zeros(0, 1, 6 * 48)

    def outcome():
        try:
            return hift.decode(x=mel, s=source).shape
        except RuntimeError as error:
            return str(error).splitlines()[0]

    with torch.no_grad():
        expected = outcome()
    assert patched(stack, outcome)[0] == expected
