"""Attention by what was measured to be faster: gqa_decode or SDPA, over a growing and over a static cache."""

import copy
import importlib.util

import pytest
import torch
from decoders import prefill, tiny
from decoding import error, generation, upstream
from fake_arena import FakeArena
from gqa_wins import limits

from voxfuse.fusions import gqa_attention
from voxfuse.fusions.decode_graph import DecodeRunner
from voxfuse.fusions.decode_step import empty_cache, reads_whole_cache
from voxfuse.kernels import _measured
from voxfuse.kernels._op import TALLIES, Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

HEADS = ("9.0", "fp32", 4, 2, 8)  # of the tiny decoders


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(_measured, "_capability_of", lambda device: "9.0")
    monkeypatch.setattr(_measured, "GQA_WINS", {HEADS: ((1, 2, 30, 50),)})
    monkeypatch.setattr(_measured, "STATIC_GQA_WINS", {HEADS: ((1, 2, 1, 256),)})


def cache(rows, keys, head_dim=8):
    return torch.randn(rows, 2, keys, head_dim)


def test_a_growing_cache_takes_sdpa_where_no_win_was_measured(measured):
    shapes = [(1, 30), (2, 50), (2, 29), (2, 51), (3, 40)]
    assert [_measured.gqa_wins(4, cache(*shape)) for shape in shapes] == [True, True, False, False, False]
    assert not _measured.gqa_wins(4, cache(1, 40, 16)) and not _measured.gqa_wins(4, cache(1, 40).bfloat16())


def test_a_static_cache_takes_gqa_decode_where_nothing_was_measured(measured):
    shapes = [(2, 256), (3, 256), (2, 512)]
    assert [_measured.static_gqa_wins(4, cache(*shape)) for shape in shapes] == [True, False, False]
    assert _measured.static_gqa_wins(4, cache(3, 512, 16))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rows", "keys", "dtype", "wins"),
    [
        (14, 2, 64, 1, 512, torch.bfloat16, True),  # 1.19
        (14, 2, 64, 1, 2048, torch.bfloat16, True),  # 1.04, at a bar of 3 %
        (14, 2, 64, 16, 512, torch.bfloat16, False),  # 1.00
        (16, 8, 128, 1, 512, torch.bfloat16, True),  # 1.36
        (16, 16, 64, 1, 512, torch.bfloat16, True),  # 1.25
        (16, 16, 64, 16, 512, torch.bfloat16, False),  # 0.82
        (14, 2, 64, 1, 512, torch.float32, False),  # wrong
    ],
)
def test_an_h200_runs_what_its_records_say(q_heads, kv_heads, head_dim, rows, keys, dtype, wins, monkeypatch):
    """Verdicts against SDPA of ``voxfuse bench gqa_attention``, 2026-12-01 15:44 UTC, commit 08f51d9."""
    monkeypatch.setattr(_measured, "_capability_of", lambda device: "9.0")
    held = torch.empty(rows, kv_heads, keys, head_dim, dtype=dtype, device="meta")
    assert _measured.gqa_wins(q_heads, held) == wins


def test_without_a_gpu_the_kernels_backend_is_asked():
    assert _measured.gqa_wins(4, cache(64, 9000)) and _measured.static_gqa_wins(4, cache(64, 9000))


@pytest.mark.parametrize(("keys", "decodes"), [(40, True), (60, False)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_the_same_by_either(keys, decodes, masked, measured, request, monkeypatch):
    taken = []
    reference = gqa_attention.gqa_decode.reference
    monkeypatch.setattr(gqa_attention.gqa_decode, "reference", lambda *args: taken.append(args) or reference(*args))
    q, k, v = torch.randn(2, 4, 1, 8), cache(2, keys), cache(2, keys)
    mask = torch.rand(2, 1, 1, keys) > 0.3 if masked else None
    run = Run("reference", request.node.nodeid)
    y, _ = gqa_attention.attend(torch.nn.Module(), q, k, v, mask, run)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(y, expected.transpose(1, 2))
    assert bool(taken) == (decodes or masked)
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_a_step_by_sdpa_gives_upstreams_tokens(name, measured, request):
    run = Run("reference", request.node.nodeid)
    model = tiny(name, layers=2, **({"head_dim": 8} if name == "Qwen3" else {}))
    prompts = [[3, 9, 4, 1, 5], [7, 2], [11, 12, 13]]
    assert reads_whole_cache(model.model, empty_cache(model.model, 3, 256))
    assert not reads_whole_cache(model.model, empty_cache(model.model, 2, 256))
    ours, theirs = generation(model, run, prompts, clear=True), upstream(model, prompts)
    for token in ([4, 5, 6], [1, 8, 3], [2, 2, 2]):
        ids = torch.tensor(token)
        torch.testing.assert_close(ours(ids), theirs(ids), rtol=1e-4, atol=1e-5)
    assert TALLIES.of(run.receipt).calls == 3 * (2 * 5 + 1)  # SDPA counts as gqa_decode would


@torch.no_grad()
def test_a_lane_that_sdpa_reads_is_cleared_for_the_next_generation(measured, request):
    FakeArena.made, FakeArena.fail = [], None
    model = tiny("Llama")
    run = Run("reference", request.node.nodeid)
    runner = DecodeRunner(model.model, model.lm_head, run, capture="first_use", arena=FakeArena)
    prompts = [[3, 9, 4, 1, 5], [7, 2, 4], [11, 12, 13]]
    for _ in range(2):
        past, _, lengths = prefill(model, prompts)
        theirs = upstream(model, prompts)
        with runner.session(past, lengths) as session:
            for token in ([4, 5, 6], [1, 8, 3], [2, 2, 2]):
                ids = torch.tensor(token)
                torch.testing.assert_close(session.step(ids)[:, 0], theirs(ids), rtol=1e-4, atol=1e-5)
            for part in session._lane.cache:
                part.fill_(torch.nan)
    assert runner.statistics.captures == 1


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_by_sdpa_are_as_near_to_fp64_as_upstream(dtype, monkeypatch, request):
    """And the second generation, on a lane that held NaN."""
    sizes = {"hidden_size": 896, "intermediate_size": 1024, "num_attention_heads": 14, "num_key_value_heads": 2}
    model = tiny("Qwen2", layers=2, **sizes).to("cuda", dtype)
    exact = copy.deepcopy(model).double()
    key = _measured._heads(14, torch.empty(1, 2, 1, 64, dtype=dtype, device="cuda"))
    monkeypatch.setattr(_measured, "STATIC_GQA_WINS", {key: ()})
    run = Run("triton", request.node.nodeid)
    runner = DecodeRunner(model.model, model.lm_head, run, capture="first_use")
    prompts = [[3, 9, 4, 1, 5], [7, 2, 4]]
    for _ in range(2):
        past, _, lengths = prefill(model, prompts)
        decoders = upstream(model, prompts), upstream(exact, prompts)
        with runner.session(past, lengths) as session:
            logits = []
            for token in ([4, 5], [1, 8], [2, 2], [6, 3]):
                ids = torch.tensor(token, device="cuda")
                logits.append([session.step(ids)[:, 0], *(decode(ids) for decode in decoders)])
            for part in session._lane.cache:
                part.fill_(torch.nan)
        mine, eager, true = (torch.stack(kind) for kind in zip(*logits, strict=True))
        assert error(mine, true) <= max(1.25 * error(eager, true), torch.finfo(dtype).eps)
    assert runner.statistics.replays == 8 and not TALLIES.of(run.receipt).fallbacks


def test_lines_of_the_table_from_judged_points():
    points = {(1, 32): False, (1, 512): True, (1, 2048): True, (16, 32): True, (16, 512): False, (16, 2048): True}
    assert limits(points) == ((1, 1, 128, 2048), (2, 16, 1, 128), (2, 16, 1024, 2048))
    assert limits({(1, 64): False}) == ()
