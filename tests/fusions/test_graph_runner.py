"""The graph runner's own logic on the CPU, with a fake graph that reruns its call on the static tensors."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from fake_arena import FakeArena

from voxfuse.fusions._graph_arena import CaptureError
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Buckets, Length
from voxfuse.fusions.graph_runner import WEIGHTS_REPLACED, GraphRunner, capture_asked, capturing, runners
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels.mean_act import mean_act

CPU = torch.device("cpu")
CHANNELS = 3
PLENTY = 2**30


class Upsampler(torch.nn.Module):
    """y[rows, 2·frames]: weighted channels, cumulated over valid frames, each frame twice; a masked call."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x, gain, lengths=None, receipt="unattributed"):
        x = mean_act(x, None, None, lengths, 1.0, 1.0, run=Run("reference", receipt))
        y = torch.einsum("rct,c->rt", x, self.weight) * gain
        y = y.cumsum(1).repeat_interleave(2, 1)
        if lengths is not None:
            y = torch.where(torch.arange(y.shape[1]) < 2 * lengths.view(-1, 1), y, 0.0)
        return y


@pytest.fixture
def arenas():
    FakeArena.made, FakeArena.fail = [], None
    yield FakeArena
    FakeArena.fail = None


@pytest.fixture
def make(request, arenas):
    def runner(owner, **options):
        receipt = request.node.nodeid
        return GraphRunner(
            owner,
            lambda module, x, gain, lengths: module(x, gain, lengths, receipt),
            inputs=((CHANNELS, Length(1)), (1,)),
            output=(Length(2),),
            buckets=Buckets(),
            **{"memory_cap_bytes": PLENTY, "receipt": receipt, "arena": FakeArena, **options},
        )

    return runner


@pytest.fixture
def tally(request):
    return TALLIES.of(request.node.nodeid)


def case(length, rows=1):
    return torch.randn(rows, CHANNELS, length), torch.rand(rows, 1)


@torch.no_grad()
def test_every_length_gets_its_own_result_in_memory_of_its_own(make):
    module = Upsampler()
    runner = make(module, capture="first_use")
    results = []
    for length in (40, 1, 2, 13, 39, 40, 64, 17, 8, 9):  # shorter ones follow longer ones of the same bucket
        tensors = case(length)
        results.append((runner(*tensors), module(*tensors)))
    for result, expected in results:  # only now: a later replay may not reach an earlier result
        torch.testing.assert_close(result, expected)
        assert result.is_contiguous()


@torch.no_grad()
def test_mixed_lengths_equal_each_row_alone_and_have_a_zero_tail(make):
    module = Upsampler()
    x, gain = case(20, rows=3)
    lengths = [20, 3, 1]
    for given in (lengths, torch.tensor(lengths)):
        replayed = make(module, capture="first_use")(x, gain, lengths=given)
        missed = make(module)(x, gain, lengths=given)
        torch.testing.assert_close(replayed, missed)
        for row, length in enumerate(lengths):
            alone = module(x[row : row + 1, :, :length], gain[row : row + 1])
            torch.testing.assert_close(replayed[row : row + 1, : 2 * length], alone)
            assert torch.all(replayed[row, 2 * length :] == 0)


@torch.no_grad()
def test_nothing_is_captured_unless_asked(make, tally):
    module = Upsampler()
    runner = make(module)
    torch.testing.assert_close(runner(*(tensors := case(12))), module(*tensors))
    assert (runner.statistics.captures, runner.statistics.replays) == (0, 0)
    (reason,) = runner.statistics.misses
    assert "no graph of 1 rows × 16" in reason and dict(tally.fallbacks) == {reason: 1}
    with capturing():
        runner(*case(12))
    runner(*case(10))
    assert (runner.statistics.captures, runner.statistics.replays) == (1, 2)
    runner(*case(10, rows=2))
    assert (runner.statistics.captures, sum(runner.statistics.misses.values())) == (1, 2), "rows are exact"


@torch.no_grad()
def test_capturing_is_for_this_thread_only(make):
    module = Upsampler()
    runner = make(module)
    with capturing():
        thread = threading.Thread(target=lambda: torch.no_grad()(runner)(*case(12)))
        thread.start()
        thread.join()
    assert runner.statistics.captures == 0 and sum(runner.statistics.misses.values()) == 1


def test_coroutines_of_a_thread_may_leave_capturing_in_any_order():
    first, second = capturing(), capturing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert capture_asked()
    second.__exit__(None, None, None)
    assert not capture_asked() and not capture_asked(anywhere=True)


@torch.no_grad()
def test_warm_captures_buckets_largest_first(make, arenas):
    module = Upsampler()
    runner = make(module)
    runner.warm([(1, 3), (1, 5), (2, 30), (1, 200)], "cpu", torch.float32)
    assert runner.statistics.captures == 3
    assert [arena.captured[0].shape for arena in arenas.made] == [(1, 416), (2, 64), (1, 16)]
    runner(*case(8))
    assert runner.statistics.replays == 1 and not runner.statistics.misses


@torch.no_grad()
def test_a_replay_counts_what_its_capture_counted_and_the_capture_nothing(make, tally):
    module = Upsampler()
    runner = make(module)
    runner.warm([(1, 8)], "cpu", torch.float32)
    assert tally.calls == 0
    runner(*case(8))
    runner(*case(7))
    assert tally.calls == 2 and not tally.fallbacks


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "parameter", "submodule", "moved"])
def test_new_weights_are_captured_again_and_the_receipt_says_so(make, tally, change):
    module = torch.nn.Sequential(Upsampler())
    runner = make(module, capture="warmup")
    runner._call = lambda owner, x, gain, lengths: owner[0](x, gain, lengths)
    runner.warm([(1, 8)], "cpu", torch.float32)
    if change == "in place":
        module.load_state_dict(torch.nn.Sequential(Upsampler()).state_dict())
    elif change == "parameter":
        module[0].weight = torch.nn.Parameter(torch.randn(CHANNELS))
    elif change == "submodule":
        module[0] = Upsampler()
    else:
        module[0].weight.data = torch.randn(CHANNELS)
    torch.testing.assert_close(runner(*(tensors := case(5))), module[0](*tensors))
    assert (runner.statistics.captures, runner.statistics.recaptures, runner.statistics.replays) == (2, 1, 1)
    assert dict(tally.fallbacks) == {WEIGHTS_REPLACED: 1}
    runner(*case(5))
    assert runner.statistics.captures == 2


@torch.no_grad()
@pytest.mark.parametrize("size", [(), (0,), (1,), (2,)])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_weights_see_a_replacement_of_equal_value(size, kind):
    module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Identity())
    table = module[0]._parameters if kind == "parameter" else module[0]._buffers
    table["gain"] = torch.nn.Parameter(torch.ones(size)) if kind == "parameter" else torch.ones(size)
    table["none"] = None
    weights = Weights(module)
    assert not weights.changed()
    table["gain"] = copy.deepcopy(table["gain"])
    assert weights.changed()
    weights = Weights(module)
    table["none"] = torch.ones(2)
    assert weights.changed()
    del table["none"]
    assert weights.changed() and Weights(module).changed() is False


class Recorded(FakeArena):
    """Its graphs give what they gave when they were captured, as a CUDA graph does with weights that were replaced."""

    def capture(self, call):
        graph, output = super().capture(call)
        self.replays = []
        graph.replay = lambda: self.replays.append(output.fill_(-1))
        return graph, output


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "parameter", "moved", "none"])
def test_what_a_replay_with_replaced_weights_gave_is_thrown_away(make, tally, change):
    module = Upsampler()
    runner = make(module, arena=Recorded)
    runner.warm([(1, 8)], "cpu", torch.float32)
    if change == "in place":
        module.weight.copy_(torch.randn(CHANNELS))
    elif change == "parameter":
        module.weight = torch.nn.Parameter(torch.randn(CHANNELS))
    elif change == "moved":
        module.weight.data = torch.randn(CHANNELS)
    first = Recorded.made[0]
    result = runner.attempt(5, *case(5))
    assert torch.all(result == -1) and len(first.replays) == 1
    changed = change != "none"
    assert (first.closed, len(Recorded.made)) == (changed, 1 + changed)
    if changed:
        assert len(Recorded.made[1].replays) == 1
    assert (runner.statistics.recaptures, runner.statistics.replays, tally.calls) == (changed, 1, 1)


@torch.no_grad()
def test_an_attempt_gives_the_values_of_the_weights_there_are_or_the_reason(make, tally):
    module = Upsampler()
    owner = torch.nn.Sequential(module)
    strange = []
    runner = make(owner, foreign=lambda _: strange[0] if strange else None)
    runner._call = lambda owner, x, gain, lengths: owner[0](x, gain, lengths)
    assert "no graph of 1 rows × 8" in runner.attempt(5, *case(5))
    runner.warm([(1, 8)], "cpu", torch.float32)
    for weights in (None, torch.randn(CHANNELS), torch.randn(CHANNELS)):
        if weights is not None:
            module.weight.copy_(weights)
        torch.testing.assert_close(runner.attempt(5, *(tensors := case(5))), module(*tensors))
    strange.append("a part is not upstream's")
    module.weight.mul_(2)
    assert runner.attempt(5, *case(5)) == strange[0]
    assert (runner.statistics.replays, runner.statistics.captures) == (3, 3)


@torch.no_grad()
def test_a_graph_keeps_what_it_reads_until_it_leaves(make):
    """Packs are made anew when weights change; a replay may still be under way, or come before that is noticed."""

    class Pack:
        pass

    module = Upsampler()
    runner = make(module)
    made = lambda: pack(module, "a pack", [module.weight], Pack)  # noqa: E731
    runner._call = lambda owner, x, gain, lengths: (made(), owner(x, gain, lengths))[1]
    runner.warm([(1, 8)], "cpu", torch.float32)
    held, address = weakref.ref(made()), module.weight.data_ptr()
    module.weight.data = torch.randn(CHANNELS)
    made()
    gc.collect()
    assert held() is not None
    assert all(torch.randn(CHANNELS).data_ptr() != address for _ in range(50)), "the old weights' memory was given back"
    runner.attempt(5, *case(5))
    gc.collect()
    assert held() is None


@torch.no_grad()
def test_a_number_stands_for_a_whole_input(make):
    module = Upsampler()
    runner = make(module, capture="first_use")
    x, gain = case(12, rows=2)
    runner(x, gain)
    found = runner.find(2, 12, CPU, torch.float32)
    for given in (3.0, 3.0, gain, 3.0, 2.0):
        whole = given if isinstance(given, torch.Tensor) else torch.full_like(gain, given)
        torch.testing.assert_close(runner.replay(found, 12, x, given), module(x, whole))
    lengths = [12, 5]  # and back to whole rows
    torch.testing.assert_close(
        runner.replay(found, 12, x, 2.0, lengths=lengths), runner(x, 2 + 0 * gain, lengths=lengths)
    )
    torch.testing.assert_close(runner.replay(found, 12, x, 2.0), module(x, 2 + 0 * gain))
    runner._shelves.clear()
    found.shelf.closed = True
    torch.testing.assert_close(runner.replay(found, 12, x, 3.0), module(x, 3 + 0 * gain))


@torch.no_grad()
@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, CHANNELS, 7), torch.zeros(2, CHANNELS, 8), torch.zeros(1, 3, 8).double()]
)
def test_what_was_found_takes_tensors_of_its_shape_only(make, wrong):
    module = Upsampler()
    runner = make(module, capture="first_use")
    runner(*case(8))
    with pytest.raises(ValueError, match=r"expected \[1, 3, 8\], torch.float32 on cpu, got"):
        runner.replay(runner.find(1, 8, CPU, torch.float32), 8, wrong, torch.ones(1, 1))


@torch.no_grad()
def test_above_the_cap_the_least_recently_used_arena_leaves(make, arenas):
    module = Upsampler()
    cap = sum(20 * bucket + 12 for bucket in (512, 1024, 2048))  # an output, two inputs and the length, in bytes
    runner = make(module, memory_cap_bytes=cap)
    with capturing():
        for length in (512, 64, 500, 1024, 2048):
            runner(*case(length))
    assert [arena.captured[0].shape[1] // 2 for arena in arenas.made if arena.closed] == [64]
    assert (runner.statistics.evictions, runner.statistics.bytes) == (1, cap)
    before = runner.statistics.captures
    torch.testing.assert_close(runner(*(tensors := case(64))), module(*tensors))
    assert runner.statistics.captures == before, "an evicted bucket is captured again only where asked"


@torch.no_grad()
def test_a_graph_above_the_cap_is_refused_once_and_called_instead(make, tally, arenas):
    module = Upsampler()
    runner = make(module, capture="first_use", memory_cap_bytes=1000)
    with pytest.warns(RuntimeWarning, match="above the memory cap of 1000; this bucket runs uncaptured"):
        torch.testing.assert_close(runner(*(tensors := case(500))), module(*tensors))
    runner(*case(500))
    (reason,) = runner.statistics.misses
    assert runner.statistics.misses[reason] == 2 == tally.fallbacks[reason] and runner.statistics.captures == 1
    assert arenas.made[0].closed and runner.statistics.bytes == 0
    runner(*case(8))
    assert runner.statistics.replays == 1, "small buckets still are captured"


@torch.no_grad()
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), CaptureError("a sync")])
@pytest.mark.parametrize("again", ["warm", "capturing"])
def test_a_failed_capture_falls_back_until_asked_again(make, tally, arenas, error, again):
    module = Upsampler()
    runner = make(module, capture="first_use")
    arenas.fail = error
    with pytest.warns(RuntimeWarning, match="capture of 1 rows × 8 failed: (CUDA out of memory|a sync)"):
        torch.testing.assert_close(runner(*(tensors := case(8))), module(*tensors))
    arenas.fail = None
    runner(*case(8))
    (reason,) = tally.fallbacks
    assert tally.fallbacks[reason] == 2 and runner.statistics.captures == 0
    if again == "warm":
        runner.warm([(1, 8)], "cpu", torch.float32)
        runner(*case(8))
    else:
        with capturing():
            runner(*case(8))
    assert (runner.statistics.captures, runner.statistics.replays) == (1, 1)


@torch.no_grad()
def test_a_warm_up_tries_a_failing_capture_once(make, tally, arenas):
    module = Upsampler()
    runner = make(module)
    arenas.fail = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="CUDA out of memory") as warned, capturing():
            runner(*case(8))
            with capturing():
                runner(*case(8))
        assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner(*case(8))
    assert tally.fallbacks.total() == 5


@torch.no_grad()
def test_an_error_of_the_call_itself_is_raised(make):
    module = Upsampler()
    runner = make(module, capture="first_use")
    runner._call = lambda *_: (_ for _ in ()).throw(TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        runner(*case(8))
    with pytest.raises(ValueError, match="expected"):
        runner(torch.randn(1, CHANNELS + 1, 8), torch.rand(1, 1))


@torch.no_grad()
def test_threads_share_graphs(make):
    module = Upsampler()
    runner = make(module, capture="first_use")
    faults = []

    @torch.no_grad()
    def work(length):
        for step in range(30):
            tensors = case(1 + (length + 7 * step) % 40)
            if not torch.allclose(runner(*tensors), module(*tensors), atol=1e-5):
                faults.append(length)

    threads = [threading.Thread(target=work, args=(length,)) for length in (3, 17, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and runner.statistics.replays == 90


def test_it_lives_beside_the_module_and_goes_with_it(make, arenas):
    module = Upsampler()
    runner = make(module, capture="first_use")
    torch.no_grad()(runner)(*case(8))
    assert runners(torch.nn.Sequential(module)) == [runner]
    assert list(module.state_dict()) == ["weight"] and len(pickle.dumps(module)) < 2000
    assert runners(copy.deepcopy(module)) == []
    del module
    gc.collect()
    with pytest.raises(ReferenceError, match="weakly"):
        runner(*case(20))
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None and arenas.made[0].closed
