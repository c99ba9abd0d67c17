"""A whole decode step as a case: its arms agree, every call is alike, and what cannot run is wrong or absent."""

import msgspec
import pytest
import torch

from voxfuse.kernels._op import Run
from voxfuse.microbench import bench, decode_step_arms
from voxfuse.microbench.arms import contest, operation_of
from voxfuse.microbench.cases import load_cases
from voxfuse.microbench.judge import error_fp64
from voxfuse.microbench.timer import HostClock

pytest.importorskip("transformers")
CPU = torch.device("cpu")
CASES = {judged.case.name: judged for judged in load_cases("transformers") if "family" in judged.case.parameters}
LLAMA = "Llama T3 decode step, fp32, 2 rows, 512 keys"


def made_of(name, backend="eager"):
    case = decode_step_arms.tiny(CASES[name].case)
    run = Run("reference", "test")
    return contest("decode_graph", case, CPU, HostClock(), run, {"launch_floor_us": 1.0}, backend)


@pytest.mark.parametrize("name", CASES)
def test_the_arms_of_a_small_model_agree_and_find_the_same_cache_at_every_call(name):
    made = made_of(name)
    first, second = made.sets
    oracle = made.eager(first[0].double(), first[1])
    assert oracle.dtype == torch.float64
    dtype = first[0].dtype
    arms = {"eager": made.eager, "voxfuse": made.voxfuse} | {
        name: arm for name, arm in made.baselines.items() if not isinstance(arm, str)
    }
    compiled = {"compile"} if CASES[name].case.parameters["compiled"] else set()
    assert arms.keys() == {"eager", "voxfuse", "fused", "graph"} | compiled
    assert arms.keys() == made.counted.keys()
    for arm in (*arms.values(), *made.counted.values()):
        logits = arm(*first)
        assert logits.dtype == dtype and error_fp64(logits, oracle) < 4 * torch.finfo(dtype).eps
        assert not torch.equal(arm(*second), logits)
        assert torch.equal(arm(*first), logits)


def test_the_whole_cache_counts():
    """Behind other tokens the same token has other logits."""
    made = made_of(LLAMA)
    step = made.voxfuse.func
    before = made.voxfuse(*made.sets[0])
    cache = step._captured._lane.cache
    cache.values[:, :, :, :4] += 1.0
    assert error_fp64(made.voxfuse(*made.sets[0]), before.double()) > 1e-2


def test_the_bytes_of_a_step_are_weights_and_cache():
    embeddings, read = decode_step_arms.step_inputs(
        CASES["Qwen2-0.5B decode step, bf16, 1 row, 512 keys"].case, torch.Generator()
    )
    assert embeddings.shape == (1, 1, 896) and embeddings.dtype == torch.bfloat16
    decoder = 494_032_768 - 151_936 * 896  # Qwen2-0.5B as released, without its tied embedding
    assert read.nbytes == 2 * (decoder + 6761 * 896 + 2 * 24 * 2 * 512 * 64)
    assert read.untyped_storage().nbytes() == 1


def test_a_refused_session_makes_the_verdict_wrong(monkeypatch):
    monkeypatch.setattr(decode_step_arms.DecodeRunner, "begin", lambda *_: "no such model")
    case = CASES[LLAMA]
    case = msgspec.structs.replace(case, case=decode_step_arms.tiny(case.case))
    (found,) = bench.run([case], bench.bench_for(CPU, 30, lambda: 1e9), {}, lambda verdict: None)
    assert found.outcome == "wrong" and "no such model" in found.verdict.wrong
    arms = {arm.name: arm for arm in found.verdict.arms}
    assert "no such model" in arms["fused"].absent


def test_a_static_cache_of_another_transformers_is_absent_with_the_reason(monkeypatch):
    def other(self):
        raise TypeError("StaticCache wants a batch size")

    monkeypatch.setattr(decode_step_arms.DecodeStep, "_static_step", other)
    made = made_of(LLAMA)
    assert made.baselines["graph"] == "TypeError: StaticCache wants a batch size"
    assert "a minute" in made.baselines["compile"] and "graph" not in made.counted


def test_a_dry_run_is_timed_by_the_wall_and_has_figures_of_every_arm():
    cases = bench.tiny(bench.choose(["decode_graph"], case="decode step, bf16, 16"))
    assert operation_of("decode_graph", cases[0].case).timed == cases[0].case.parameters["timed"] == "wall"
    (found,) = bench.run(cases, bench.bench_for(CPU, 30, lambda: 1e9), {}, lambda verdict: None)
    assert found.verdict.wrong is None
    assert {arm.name for arm in found.verdict.arms if arm.host_us} == {"eager", "fused", "graph", "voxfuse"}
    assert {ratio.baseline for ratio in found.verdict.ratios} == {"eager", "fused", "graph"}


def test_casts_to_single_precision_keep_doubles_in_the_oracle():
    value = torch.tensor([1 + 1e-12], dtype=torch.float64)
    with decode_step_arms.InDoubles():
        kept = [value.float(), value.to(torch.float32), value.to(dtype=torch.float32), torch.tensor([1]).float()]
    assert [item.dtype for item in kept] == [torch.float64] * 4
    assert all(torch.equal(item, value) for item in kept[:3])
