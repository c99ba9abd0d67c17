"""Decode sessions on the CPU, with a fake graph that reruns the step on the lane's tensors."""

import copy
import gc
import importlib.util
import threading

import pytest
import torch
from decoders import prefill, tiny
from fake_arena import FakeArena

from voxfuse.fusions._graph_arena import CaptureError
from voxfuse.fusions.decode_graph import DecodeRunner, DecodeSession
from voxfuse.fusions.graph_runner import capturing
from voxfuse.kernels._op import TALLIES, Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

PROMPTS = [[3, 9, 4, 1, 5], [7, 2]]
OTHERS = [[8, 8, 2], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(autouse=True)
def arenas():
    FakeArena.made, FakeArena.fail = [], None
    yield FakeArena
    FakeArena.fail = None


@pytest.fixture
def make(request):
    def runner(model, **options):
        run = Run("reference", request.node.nodeid)
        return DecodeRunner(model.model, model.lm_head, run, **{"capture": "first_use", "arena": FakeArena, **options})

    return runner


@pytest.fixture
def tally(request):
    return TALLIES.of(request.node.nodeid)


def greedy(model, prompts, count):
    """Upstream's tokens [rows, count], each row by itself."""
    rows = []
    for prompt in prompts:
        past, logits, _ = prefill(model, [prompt])
        tokens = [logits.argmax(-1)]
        for _ in range(count - 1):
            logits = model(tokens[-1].view(1, 1), past_key_values=past, use_cache=True).logits[:, -1]
            tokens.append(logits.argmax(-1))
        rows.append(torch.cat(tokens))
    return torch.stack(rows)


def begin(runner, model, prompts):
    past, logits, lengths = prefill(model, prompts)
    session = runner.session(past, lengths)
    assert isinstance(session, DecodeSession), session
    return session, logits.argmax(-1)


def go_on(session, token, count):
    tokens = [token]
    for _ in range(count - 1):
        tokens.append(session.step(tokens[-1])[:, 0].argmax(-1))
    return torch.stack(tokens, dim=1)


@torch.no_grad()
def test_tokens_are_upstreams_across_the_growth_of_the_cache(make, tally):
    model = tiny("Qwen2")
    runner = make(model)
    session, token = begin(runner, model, PROMPTS)
    assert session.capacity == 256
    assert torch.equal(go_on(session, token, 280), greedy(model, PROMPTS, 280))
    assert session.capacity == 512 and session.lengths == [284, 281]
    statistics = runner.statistics
    assert (statistics.captures, statistics.replays, statistics.misses) == (2, 279, {})
    assert tally.calls == 279 * 6 and not tally.fallbacks  # norm, rope, attention, norm, SwiGLU, norm


@torch.no_grad()
def test_a_lane_serves_the_next_session_whatever_it_holds(make):
    model = tiny("Llama")
    runner = make(model)
    session, token = begin(runner, model, PROMPTS)
    go_on(session, token, 12)
    for part in session._lane.cache:
        part.fill_(torch.nan)
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.step(token)
    with begin(runner, model, OTHERS)[0] as other:
        token = prefill(model, OTHERS)[1].argmax(-1)
        assert torch.equal(go_on(other, token, 12), greedy(model, OTHERS, 12))
    assert runner.statistics.captures == 1
    begin(runner, model, PROMPTS)  # forgotten without close
    gc.collect()
    begin(runner, model, PROMPTS)
    assert runner.statistics.captures == 1


@torch.no_grad()
def test_interleaved_generations_and_threads(make):
    model = tiny("Qwen3")
    runner = make(model)
    runner.warm([(2, 100)], lanes=2)
    (a, x), (b, y) = begin(runner, model, PROMPTS), begin(runner, model, OTHERS)
    first, second = [x], [y]
    for _ in range(10):
        first.append(a.step(first[-1])[:, 0].argmax(-1))
        second.append(b.step(second[-1])[:, 0].argmax(-1))
    assert torch.equal(torch.stack(first, 1), greedy(model, PROMPTS, 11))
    assert torch.equal(torch.stack(second, 1), greedy(model, OTHERS, 11))
    assert runner.statistics.captures == 2
    a.close(), b.close()
    results = {}

    def work(name, prompts):
        with torch.no_grad():
            session, token = begin(runner, model, prompts)
            results[name] = go_on(session, token, 20)

    threads = [threading.Thread(target=work, args=item) for item in (("a", PROMPTS), ("b", OTHERS))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for name, prompts in (("a", PROMPTS), ("b", OTHERS)):
        assert torch.equal(results[name], greedy(model, prompts, 20))


@torch.no_grad()
def test_a_stopped_row_rests_and_the_other_goes_on(make):
    model = tiny("Qwen2")
    session, token = begin(make(model), model, PROMPTS)
    head = go_on(session, token, 5)
    session.stop(0)
    tail = go_on(session, head[:, -1], 260)  # grows on the way
    assert session.lengths == [9, 2 + 4 + 259] and session.capacity == 512
    assert torch.equal(torch.cat([head[1], tail[1, 1:]]), greedy(model, PROMPTS[1:], 264)[0])


@torch.no_grad()
def test_embeddings_as_inputs_and_hidden_states_as_outputs(make, request):
    model = tiny("Qwen2")
    session, token = begin(make(model), model, PROMPTS)
    bare = DecodeRunner(model.model, None, Run("reference", request.node.nodeid), capture="first_use", arena=FakeArena)
    past, _, lengths = prefill(model, PROMPTS)
    hidden = bare.session(past, lengths)
    embedded = model.model.embed_tokens(token.view(-1, 1))
    torch.testing.assert_close(model.lm_head(hidden.step(embedded)), session.step(token.view(-1, 1)))
    for wrong in (token[:1], embedded.double(), embedded[:, :, :3], token.int()):
        with pytest.raises(ValueError, match="expected int64 ids"):
            session.step(wrong)
    first, second = (session.step(token) for _ in range(2))
    assert not torch.equal(first, second), "outputs share memory"


@torch.no_grad()
def test_without_a_lane_the_step_runs_and_is_counted(make, tally):
    model = tiny("Qwen2")
    runner = make(model, capture="warmup")
    session, token = begin(runner, model, PROMPTS)
    assert torch.equal(go_on(session, token, 5), greedy(model, PROMPTS, 5))
    reason = "no lane of 2 rows × 256: warm up inside voxfuse.capturing()"
    assert runner.statistics.misses == {reason: 4} and tally.fallbacks == {reason: 4} and tally.calls == 4 * 6
    with capturing():
        begin(runner, model, PROMPTS)
    assert runner.statistics.captures == 1
    runner.warm([(1, 600)])
    assert runner.statistics.captures == 1 + 3  # 256, 512, 1024


@torch.no_grad()
@pytest.mark.parametrize("error", [CaptureError("it waits"), torch.OutOfMemoryError("no memory")])
def test_a_failed_capture_falls_back_and_says_so(make, error):
    model = tiny("Qwen2")
    runner = make(model)
    FakeArena.fail = error
    with pytest.warns(RuntimeWarning, match=f"2 rows × 256 failed: {error}"):
        session, token = begin(runner, model, PROMPTS)
    assert torch.equal(go_on(session, token, 5), greedy(model, PROMPTS, 5))
    FakeArena.fail = None
    again, _ = begin(runner, model, PROMPTS)
    again.step(token)
    assert list(runner.statistics.misses.values()) == [5] and runner.statistics.captures == 0
    runner.warm([(2, 10)])
    assert runner.statistics.captures == 1


@torch.no_grad()
def test_the_memory_cap_evicts_free_lanes_and_never_one_in_use(make, arenas):
    model = tiny("Qwen2")
    lane = 2 * 2 * 256 * 8 * 4  # keys and values, kv heads, tokens, head_dim, bytes
    runner = make(model, memory_cap_bytes=int(3.5 * lane))
    a, _ = begin(runner, model, PROMPTS)  # two rows
    b, token = begin(runner, model, PROMPTS[:1])
    assert runner.statistics.captures == 2 and not arenas.made[0].closed
    with pytest.warns(RuntimeWarning, match="above the memory cap"):
        c, _ = begin(runner, model, PROMPTS[:1])
    c.step(token)
    assert not arenas.made[0].closed and not arenas.made[1].closed and arenas.made[2].closed
    a.close(), b.close()
    runner.warm([(3, 10)])
    assert arenas.made[0].closed and runner.statistics.bytes <= 3.5 * lane


@torch.no_grad()
def test_replaced_weights_and_types_are_captured_again(make, arenas):
    model = tiny("Qwen2")
    runner = make(model)
    session, token = begin(runner, model, PROMPTS)
    session.close()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, 0))
    model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    session, token = begin(runner, model, PROMPTS)
    assert torch.equal(go_on(session, token, 6), greedy(model, PROMPTS, 6))
    assert arenas.made[0].closed and runner.statistics.captures == 2
    model.double()
    past, _, lengths = prefill(model, PROMPTS)
    assert "float64" in runner.session(past, lengths)
    model.bfloat16()
    session.close()
    session, token = begin(runner, model, PROMPTS)
    assert session.step(token).dtype == torch.bfloat16 and arenas.made[1].closed


@torch.no_grad()
def test_what_runs_upstream_is_counted(make, tally):
    model = tiny("Qwen2", max_position_embeddings=300)
    runner = make(model)
    past, _, lengths = prefill(model, PROMPTS)
    reasons = [
        runner.session(type("StaticCache", (), {})(), lengths),
        runner.session(past, [3] * 65),
        runner.session(past, [300, 2]),
    ]
    model.train()
    reasons.append(runner.session(past, lengths))
    model.eval()
    with torch.autocast("cpu"):
        reasons.append(runner.session(past, lengths))
    for reason, part in zip(reasons, ("StaticCache", "65 rows", "301 tokens", "training", "autocast"), strict=True):
        assert part in reason and tally.fallbacks[reason] == 1
    with pytest.raises(ValueError, match="rows"):
        runner.session(past, [5])
    session, token = begin(runner, model, PROMPTS)
    session.lengths = [300, 2]
    with pytest.raises(ValueError, match="300 positions"):
        session.step(token)
    with pytest.raises(ValueError, match="cannot be captured: 0 rows"):
        runner.warm([(0, 10)])


@torch.no_grad()
def test_the_runner_holds_its_model_weakly(make):
    model = tiny("Qwen2")
    runner = make(model)
    begin(runner, model, PROMPTS)
    copy.deepcopy(model)
    del model
    gc.collect()
    with pytest.raises(ReferenceError, match="gone"):
        runner.unsupported(1, 1)


def test_on_a_cpu_nothing_is_captured(request):
    model = tiny("Qwen2")
    runner = DecodeRunner(model.model, model.lm_head, Run("reference", request.node.nodeid), capture="first_use")
    with pytest.warns(RuntimeWarning, match="graphs need a CUDA GPU"):
        begin(runner, model, PROMPTS)
