"""Decode sessions on a GPU: replays against the untouched models, interleaved, growing, on several streams."""

import copy
import importlib.util
import threading

import pytest
import torch
from decoders import prefill, tiny

from voxfuse.fusions.decode_graph import DecodeRunner, DecodeSession
from voxfuse.kernels._op import TALLIES, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent"),
]

PROMPTS = [[3, 9, 4, 1, 5], [7, 2]]
OTHERS = [[8, 8, 2], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture
def begin(request):
    """A session behind upstream's prefill, and its first tokens; one runner for each model."""
    runners = {}

    def start(model, prompts):
        if id(model) not in runners:
            run = Run("triton", request.node.nodeid)
            runners[id(model)] = DecodeRunner(model.model, model.lm_head, run, capture="first_use")
        past, logits, lengths = prefill(model, prompts)
        session = runners[id(model)].session(past, lengths)
        assert isinstance(session, DecodeSession), session
        return session, logits.argmax(-1)

    start.runners = runners
    return start


def upstream(model, prompts, tokens):
    """The model's own logits [rows, count, vocabulary] when fed ``tokens`` [rows, count], each row by itself."""
    rows = []
    for prompt, fed in zip(prompts, tokens, strict=True):
        past = prefill(model, [prompt])[0]
        steps = [model(token.view(1, 1), past_key_values=past, use_cache=True).logits[0] for token in fed]
        rows.append(torch.cat(steps))
    return torch.stack(rows)


def decode(session, token, count):
    """Greedy tokens [rows, count] that were fed, and the logits of each [rows, count, vocabulary]."""
    fed, logits = [token], []
    for _ in range(count):
        logits.append(session.step(fed[-1])[:, 0])
        fed.append(logits[-1].argmax(-1))
    return torch.stack(fed[:-1], 1), torch.stack(logits, 1)


def error(value, oracle):
    return ((value.double() - oracle).norm() / oracle.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_replays_are_as_near_to_fp64_as_upstream_across_growth(name, dtype, begin, request):
    model = tiny(name, layers=2, hidden_size=128, num_attention_heads=8, head_dim=64).to("cuda", dtype)
    session, token = begin(model, PROMPTS)
    fed, logits = decode(session, token, 270)
    assert session.capacity == 512
    exact = upstream(copy.deepcopy(model).double(), PROMPTS, fed)
    eager = upstream(model, PROMPTS, fed)
    ours, theirs = error(logits, exact), error(eager, exact)
    assert ours <= max(1.25 * theirs, torch.finfo(dtype).eps), f"{ours:.2e} against eager's {theirs:.2e}"
    assert TALLIES.of(request.node.nodeid).fallbacks == {}
    statistics = begin.runners[id(model)].statistics
    assert (statistics.captures, statistics.replays, statistics.misses) == (2, 270, {})
    assert statistics.bytes > 0


@torch.no_grad()
def test_a_replay_has_the_bits_of_the_step_without_a_graph(begin, request):
    model = tiny("Qwen2", layers=2).cuda()
    session, token = begin(model, PROMPTS)
    run = Run("triton", request.node.nodeid + " bare")
    past, _, lengths = prefill(model, PROMPTS)
    bare = DecodeRunner(model.model, model.lm_head, run).session(past, lengths)
    for _ in range(20):
        logits = session.step(token)
        assert torch.equal(logits, bare.step(token))
        token = logits[:, 0].argmax(-1)
    assert list(TALLIES.of(run.receipt).fallbacks.values()) == [20]


@torch.no_grad()
def test_interleaved_sessions_and_one_whose_lane_holds_nan(begin):
    model = tiny("Qwen3").cuda()
    session, token = begin(model, PROMPTS)
    decode(session, token, 9)
    for part in session._lane.cache:
        part.fill_(torch.nan)
    session.close()
    (a, x), (b, y) = begin(model, PROMPTS), begin(model, OTHERS)
    fed, logits = ([x], [y]), ([], [])
    for _ in range(12):
        for session, tokens, outputs in zip((a, b), fed, logits, strict=True):
            outputs.append(session.step(tokens[-1])[:, 0])
            tokens.append(outputs[-1].argmax(-1))
    for prompts, tokens, outputs in zip((PROMPTS, OTHERS), fed, logits, strict=True):
        expected = upstream(model, prompts, torch.stack(tokens[:-1], 1))
        torch.testing.assert_close(torch.stack(outputs, 1), expected, rtol=1e-3, atol=1e-4)
    assert begin.runners[id(model)].statistics.captures == 2


@torch.no_grad()
def test_threads_on_streams_of_their_own(begin):
    model = tiny("Qwen2").cuda()
    held = [begin(model, prompts) for prompts in (PROMPTS, OTHERS)]  # captured before serving
    for session, _ in held:
        session.close()
    results = {}

    def work(index, prompts):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            session, token = begin(model, prompts)
            results[index] = decode(session, token, 100)
            session.close()
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=item) for item in enumerate((PROMPTS, OTHERS))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for index, prompts in enumerate((PROMPTS, OTHERS)):
        fed, logits = results[index]
        torch.testing.assert_close(logits, upstream(model, prompts, fed), rtol=1e-3, atol=1e-4)
    assert begin.runners[id(model)].statistics.captures == 2


@torch.no_grad()
def test_a_capture_while_another_thread_works_on_a_stream_of_its_own(begin):
    """It allocates and launches all the time, and its products stay right."""
    begun, ended, wrong, rounds = threading.Event(), threading.Event(), [], []
    a = torch.randint(-3, 4, (512, 512), device="cuda").float()
    expected = a @ a

    def work():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            while not ended.is_set():
                product = a.clone() @ a.clone()
                rounds.append(torch.empty(2**20 + 512 * len(rounds), device="cuda").shape)
                if not torch.equal(product, expected):
                    wrong.append(product)
                begun.set()

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        model = tiny("Qwen2", layers=2).cuda()
        before = len(rounds)
        session, token = begin(model, PROMPTS)
        fed, logits = decode(session, token, 20)
        assert len(rounds) > before and begin.runners[id(model)].statistics.captures == 1
    finally:
        ended.set()
        thread.join()
    assert not wrong
    torch.testing.assert_close(logits, upstream(model, PROMPTS, fed), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_three_thousand_tokens_stay_as_near_to_fp64_as_upstream(begin):
    """Both are fed the same tokens; the last five hundred logits may be no further from fp64 than upstream's."""
    model = tiny("Qwen2", layers=4, max_position_embeddings=4096).to("cuda", torch.bfloat16)
    session, token = begin(model, PROMPTS[:1])
    fed, logits = decode(session, token, 3000)
    tail = slice(2500, 3000)
    exact = upstream(copy.deepcopy(model).double(), PROMPTS[:1], fed)[:, tail]
    eager = upstream(model, PROMPTS[:1], fed)[:, tail]
    ours, theirs = error(logits[:, tail], exact), error(eager, exact)
    assert ours <= 1.25 * theirs, f"{ours:.2e} against eager's {theirs:.2e}"
    assert session.capacity == 4096
