"""The patches of HiFT on the real classes of every stack (hift_classes), against the untouched module."""

import copy
import io
import pickle
import sys

import hift_classes
import pytest
import torch
from fake_arena import FakeArena

import voxfuse
from voxfuse.fusions import hift_graph
from voxfuse.fusions.graph_runner import capturing, runners
from voxfuse.fusions.hift import samples_per_frame
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import _hift, cosyvoice3, registry
from voxfuse.patches.guards import resolve

CLOSE = 1e-5  # relative RMS: fp32 roundings amplified by exp


@pytest.fixture(params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


@pytest.fixture
def hift(stack):
    return hift_classes.generator(stack)


def mel_of(rows=1, frames=6):
    return torch.randn(rows, hift_classes.BINS, frames)


def infer(hift, mel, *cache):
    """Upstream's ``inference`` with the same noise each time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return hift.inference(mel, *cache)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


# --- residual blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_residual_blocks_by_class(stack, hift, backend):
    mel = mel_of(frames=3)
    baseline, source = infer(hift, mel)
    with voxfuse.apply_patches(stack, include=["snake_conv_block"], policy="all", backend=backend) as patches:
        audio, heard = infer(hift, mel)
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "snake_conv_block")
        blocks = len(hift.resblocks) + len(hift.source_resblocks)
        assert (receipt.status, receipt.calls, dict(receipt.fallbacks)) == ("applied", 7 * blocks, {})
    assert torch.equal(heard, source) and relative_rms(audio, baseline) < CLOSE
    assert torch.equal(infer(hift, mel)[0], baseline), "revert did not restore upstream"


def test_the_graph_needs_a_gpu_and_the_receipt_says_so(stack):
    with voxfuse.apply_patches(stack, policy="all", backend="reference") as patches:
        found = {receipt.fusion: (receipt.status, receipt.reason) for receipt in patches.receipts}
    assert found["hift_graph"] == ("skipped", "runs with backend triton, not reference")
    assert found["snake_conv_block"][0] == "applied"


def test_one_instance_among_two(stack, hift):
    other, mel = copy.deepcopy(hift), mel_of()
    baseline, _ = infer(hift, mel)
    with voxfuse.apply_patches(hift, policy="all", backend="reference") as patches:
        assert relative_rms(infer(hift, mel)[0], baseline) < CLOSE
        calls, counts = _block_calls(patches)
        assert calls == 7 * counts
        assert torch.equal(infer(other, mel)[0], baseline)
        assert _block_calls(patches) == (calls, counts)
    assert torch.equal(infer(hift, mel)[0], baseline)


def _block_calls(patches):
    """Calls and blocks; of upstream's checkout two stacks have the block, and share one replacement."""
    ((calls, count),) = {(r.calls, r.count) for r in patches.receipts if r.fusion == "snake_conv_block"}
    return calls, count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_in_other_types(stack, dtype):
    """Outside the envelope upstream's block runs, inside it the type of the input stays."""
    block = hift_classes.upstream(stack).ResBlock(8, 3, [1, 3]).eval().to(dtype)
    x = torch.randn(2, 8, 19, dtype=dtype)
    with torch.no_grad():
        baseline = block(x)
        with voxfuse.apply_patches(stack, policy="all", backend="reference") as patches:
            result = block(x)
            (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "snake_conv_block")
    assert result.dtype == dtype
    if dtype == torch.float64:
        (reason,) = receipt.fallbacks
        assert torch.equal(result, baseline) and "float64" in reason
    else:
        assert relative_rms(result, baseline) < 0.02 and not receipt.fallbacks


def test_gradients_autocast_and_foreign_snakes_run_upstreams_block(stack, hift):
    block, x = hift.resblocks[0], torch.randn(1, 16, 9)
    with voxfuse.apply_patches(stack, policy="all", backend="reference") as patches:
        block(x).sum().backward()
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                block(x)
            block.activations1[0].forward = lambda x: 2 * x
            doubled = block(x)
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "snake_conv_block")
    assert block.convs1[0].parametrizations.weight.original0.grad is not None
    first, second, third = receipt.fallbacks
    assert "gradient" in first and "autocast" in second and "already patched" in third and not receipt.calls
    with torch.no_grad():
        assert torch.equal(doubled, block(x))


def test_state_copies_and_pickles_of_a_patched_generator(stack, hift):
    mel = mel_of()
    baseline, _ = infer(hift, mel)
    state = hift.state_dict()
    with voxfuse.apply_patches(hift, policy="all", backend="reference"):
        infer(hift, mel)
        assert hift.state_dict().keys() == state.keys()
        with torch.no_grad():
            hift.load_state_dict({name: value * 0.5 for name, value in state.items()})
        halved, _ = infer(hift, mel)
        stored = io.BytesIO()
        torch.save(hift.state_dict(), stored)
    assert relative_rms(halved, baseline) > 1e-3
    assert relative_rms(infer(hift, mel)[0], halved) < CLOSE
    with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(hift)  # as upstream: parametrised modules cannot be pickled


# --- the decoder from graphs ----------------------------------------------------------------------------------------


@pytest.fixture
def graphs(stack, monkeypatch):
    """The replacement of ``decode`` with a fake arena on the CPU, as the class's method; its run and statistics."""
    FakeArena.made = []
    monkeypatch.setattr(hift_graph, "unsupported", lambda hift, run, *tensors: hift_graph.unsuited(hift, *tensors))
    real = hift_graph.Runners
    monkeypatch.setattr(hift_graph, "Runners", lambda *args, **options: real(*args, arena=FakeArena, **options))
    found = registry.patches_of(stack)
    patch = next(patch for patch in found.patches if patch.fusion is hift_graph.HIFT_GRAPH)
    cls = resolve(patch.target).owner
    run = Run("reference", f"{stack} replayed")
    TALLIES.of(run.receipt).fallbacks.clear()
    monkeypatch.setattr(cls, "decode", patch.build(cls.decode, run))
    return TALLIES.of(run.receipt)


def test_replays_of_interleaved_lengths_sound_as_upstream(hift, stack, graphs):
    untouched = copy.deepcopy(hift)
    untouched.decode = _original(untouched)
    with capturing():
        for frames in (12, 3, 16, 1, 9):
            mel = mel_of(2, frames)
            (audio, source), (baseline, heard) = infer(hift, mel), infer(untouched, mel)
            assert torch.equal(source, heard) and audio.shape == baseline.shape
            assert relative_rms(audio, baseline) < CLOSE
    (runner,) = runners(hift)
    assert (runner.statistics.captures, runner.statistics.replays) == (2, 5)
    assert not graphs.fallbacks


def _original(hift):
    """Upstream's ``decode`` bound to a generator, below the replacement."""
    function = type(hift).decode
    original = next(
        cell.cell_contents
        for cell in function.__closure__
        if getattr(cell.cell_contents, "__name__", "") == "decode" and cell.cell_contents is not function
    )
    return original.__get__(hift)


def test_a_cached_source_is_heard_and_returned(hift, stack, graphs):
    if stack == "cosyvoice3":
        pytest.skip("its source is drawn from frame 0 at every call: no cache")
    mel = mel_of(1, 8)
    _, source = infer(hift, mel)
    cache = torch.flip(source[:, :, :100], [2]).clone()
    original = _original(hift)
    with capturing():
        audio, heard = infer(hift, mel, cache)
    assert torch.equal(heard[:, :, :100], cache) and torch.equal(heard[:, :, 100:], source[:, :, 100:])
    with torch.no_grad():
        assert relative_rms(audio, original(mel, heard)) < CLOSE
        assert relative_rms(audio, original(mel, source)) > 1e-3


def test_without_a_graph_the_same_code_decodes_and_the_reason_is_counted(hift, graphs):
    mel = mel_of(1, 5)
    calls = graphs.calls
    audio, source = infer(hift, mel)
    with torch.no_grad():
        assert relative_rms(audio, _original(hift)(mel, source)) < CLOSE
    assert graphs.calls - calls > 7 * len(hift.resblocks)  # fused operations, each counted
    assert [*graphs.fallbacks] == ["no graph of 1 rows × 8: warm up inside voxfuse.capturing()"]


def test_calls_that_no_graph_takes(hift, graphs):
    mel, source = mel_of(1, 4), torch.randn(1, 1, 4 * samples_per_frame(hift))
    with capturing():
        with torch.no_grad():
            assert torch.equal(hift.decode(mel.double().float(), source), hift.decode(x=mel, s=source))
            assert not graphs.fallbacks
            with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
                hift.decode(mel, source)  # of bf16, torch.istft refuses the parts
            with pytest.raises(RuntimeError):
                hift.decode(mel, source[:, :, 60:])  # upstream's own error
            with pytest.raises(RuntimeError):
                hift.decode(mel)
            with pytest.raises(RuntimeError):
                hift.decode(mel.double(), source.double())
        hift.decode(mel, source)
        with torch.no_grad():
            hift.train()
            hift.decode(mel, source)
    reasons = [*graphs.fallbacks]
    for reason, word in zip(
        reasons, ("autocast", "the source must", "the source must", "fp32", "gradient", "training"), strict=True
    ):
        assert word in reason


def test_new_weights_are_captured_again_and_the_f0_predictor_may_change(hift, graphs):
    mel = mel_of(1, 4)
    source = torch.randn(1, 1, 4 * samples_per_frame(hift))
    with capturing(), torch.no_grad():
        hift.decode(mel, source)
        hift.f0_predictor.double()
        hift.decode(mel, source)
        (runner,) = runners(hift)
        assert (runner.statistics.captures, runner.statistics.recaptures) == (1, 0)
        hift.conv_pre.parametrizations.weight.original0.mul_(2)
        assert relative_rms(hift.decode(mel, source), _original(hift)(mel, source)) < CLOSE
    assert (runner.statistics.captures, runner.statistics.recaptures) == (2, 1)


@torch.no_grad()
def test_a_part_that_becomes_foreign_after_the_capture_runs_upstreams_code(hift, graphs):
    mel, source = mel_of(1, 4), torch.randn(1, 1, 4 * samples_per_frame(hift))
    with capturing():
        hift.decode(mel, source)
        hift.conv_pre.register_forward_hook(lambda *_: None)
        hift.conv_pre.parametrizations.weight.original0.mul_(2)
        assert torch.equal(hift.decode(mel, source), _original(hift)(mel, source))
    assert dict(graphs.fallbacks) == {"conv_pre has a forward hook, which a graph would not run": 1}


def test_mixed_lengths_through_a_graph(hift, stack):
    FakeArena.made = []
    graphs = hift_graph.Runners(Run("reference", "mixed hift"), "first_use", FakeArena)
    per_frame = samples_per_frame(hift)
    mel, source = mel_of(3, 10), torch.randn(3, 1, 10 * per_frame)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hift_graph, "unsupported", lambda *_: None)
        audio = graphs.decode(hift, mel, source, lengths=[10, 1, 7])
        for row, length in enumerate((10, 1, 7)):
            one = slice(row, row + 1)
            alone = hift.decode(mel[one, :, :length], source[one, :, : length * per_frame])
            assert relative_rms(audio[one, : length * per_frame], alone) < CLOSE
            assert torch.all(audio[row, length * per_frame :] == 0)


def test_generators_that_are_not_upstreams_are_refused_by_name(stack, hift):
    where = registry.patches_of(stack).patches[0].build.keywords["where"]
    assert _hift.foreign_generator(where, hift) is None and hift_graph.foreign_part(hift) is None
    changed = copy.deepcopy(hift)
    changed._stft = lambda x: x
    assert "already patched" in _hift.foreign_generator(where, changed)
    changed = copy.deepcopy(hift)
    changed.resblocks[2].activations2[1] = torch.nn.SiLU()
    assert _hift.foreign_generator(where, changed) == "the activation is SiLU, expected upstream's Snake"
    hift.f0_predictor.condnet[0].register_forward_hook(lambda *_: None)
    assert hift_graph.foreign_part(hift) is None
    hift.source_downs[0].register_forward_hook(lambda *_: None)
    assert hift_graph.foreign_part(hift) == "source_downs.0 has a forward hook, which a graph would not run"


def test_a_cpu_is_refused_and_counted(hift, stack):
    graphs = hift_graph.Runners(Run("triton", f"{stack} on a cpu"))
    with torch.no_grad():
        reason = graphs.decode(hift, mel_of(1, 2), torch.zeros(1, 1, 2 * samples_per_frame(hift)))
    assert "CUDA GPU" in reason and dict(TALLIES.of(f"{stack} on a cpu").fallbacks) == {reason: 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a compiled model")  # left behind on purpose, until the reset
def test_a_block_compiled_after_patching_has_no_graph_break(stack, hift):
    """``decode`` itself breaks in upstream's hands: the strides of its source_downs are NumPy integers."""
    block, x = hift.resblocks[1], torch.randn(2, 16, 30)
    with torch.no_grad():
        baseline = block(x)
        with voxfuse.apply_patches(stack, policy="all", backend="reference") as patches:
            compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
            assert relative_rms(compiled(x), baseline) < CLOSE
            (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "snake_conv_block")
            assert receipt.calls == 7 and not receipt.fallbacks
    torch.compiler.reset()


def test_a_call_without_rows_is_upstreams(stack, hift):
    with torch.no_grad(), voxfuse.apply_patches(stack, policy="all", backend="reference") as patches:
        assert hift.resblocks[0](torch.randn(0, 16, 9)).shape == (0, 16, 9)
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "snake_conv_block")
        (reason,) = receipt.fallbacks
        assert "not empty" in reason


def test_an_instance_asked_for_strictly(stack, hift):
    """CosyVoice's two stacks share classes; neither stands in the way of the other."""
    with voxfuse.apply_patches(hift, policy="all", backend="reference", strict=True) as patches:
        applied = {receipt.fusion for receipt in patches.receipts if receipt.status == "applied"}
    assert "snake_conv_block" in applied


@pytest.mark.parametrize("include", [None, ["sine_source"]])
def test_classes_of_a_relative_that_a_model_has_none_of_are_no_failure(include, monkeypatch):
    """cosyvoice-minicpmo has CosyVoice3's names with other sources, or not at all: nothing of it is in this model."""
    hift = hift_classes.generator("cosyvoice2")
    monkeypatch.delitem(sys.modules, cosyvoice3.REFERENCE, raising=False)  # with which the stack is another one
    with voxfuse.apply_patches(hift, policy="all", include=include, backend="reference", strict=True) as patches:
        reasons = {(r.stack, r.fusion): r.reason for r in patches.receipts if r.fusion == "sine_source"}
    if not hift_classes.CHECKOUT:
        assert reasons == {
            ("cosyvoice2", "sine_source"): None,
            ("cosyvoice3", "sine_source"): "no SourceModuleHnNSF in this model",
        }
