"""A whole decode step as a case: its arms agree, every call is alike, and what cannot run is wrong or absent."""

import msgspec
import pytest
import torch

from voxfuse.kernels._op import Run
from voxfuse.microbench import bench, decode_step_arms
from voxfuse.microbench.arms import contest, operation_of
from voxfuse.microbench.cases import load_cases
from voxfuse.microbench.judge import error_fp64
from voxfuse.microbench.timer import HostClock, WallClock

pytest.importorskip("transformers")
CPU = torch.device("cpu")
CASES = {judged.case.name: judged for judged in load_cases("transformers") if "family" in judged.case.parameters}
LLAMA = "Llama T3 decode step, fp32, 2 rows, 512 keys"


def made_of(name, backend="aot_eager"):
    case = decode_step_arms.tiny(CASES[name].case)
    run = Run("reference", "test")
    return contest("decode_graph", case, CPU, HostClock(), run, {"launch_floor_us": 1.0}, backend)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
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


@torch.no_grad()
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


def test_without_transformers_a_case_has_no_verdict_and_the_others_are_judged(monkeypatch):
    def absent(case):
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr(decode_step_arms, "build", absent)
    other = bench.tiny(bench.choose(["swiglu"]))
    cases = [msgspec.structs.replace(CASES[LLAMA], case=decode_step_arms.tiny(CASES[LLAMA].case)), *other]
    with pytest.warns(RuntimeWarning, match="not judged, No module named 'transformers'"):
        found = list(bench.run(cases, bench.bench_for(CPU, 30, lambda: 1e9), {}, lambda verdict: None))
    assert found[0].outcome == "missing" and found[1].verdict is not None


def test_a_static_cache_of_another_transformers_is_absent_with_the_reason(monkeypatch):
    def other(self, compile_backend):
        raise TypeError("StaticCache wants a batch size")

    monkeypatch.setattr(decode_step_arms.DecodeStep, "_static_step", other)
    made = made_of(LLAMA)
    assert made.baselines["graph"] == "TypeError: StaticCache wants a batch size"
    assert "a minute" in made.baselines["compile"] and "graph" not in made.counted


def test_a_case_that_is_not_there_is_no_matter_of_graphs():
    with pytest.raises(KeyError, match=r"no case of decode_graph on .* with 'nope' in its name"):
        bench.choose(["decode_graph"], case="nope")


def test_a_dry_run_is_timed_by_the_wall_and_has_figures_of_every_arm():
    cases = bench.tiny(bench.choose(["decode_graph"], case="decode step, bf16, 16"))
    assert operation_of("decode_graph", cases[0].case).timed == cases[0].case.parameters["timed"] == "wall"
    clock = HostClock()
    assert isinstance(bench.clock_of(cases[0], clock, torch.device("cuda")), WallClock)
    assert bench.clock_of(cases[0], clock, CPU) is clock
    (found,) = bench.run(cases, bench.bench_for(CPU, 30, lambda: 1e9), {}, lambda verdict: None)
    assert found.verdict.wrong is None
    assert {arm.name for arm in found.verdict.arms if arm.host_us} == {"eager", "fused", "graph", "voxfuse"}
    assert {ratio.baseline for ratio in found.verdict.ratios} == {"eager", "fused", "graph"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_graphs_are_captured_and_launches_counted(name):
    case = msgspec.structs.replace(CASES[name], case=decode_step_arms.tiny(CASES[name].case))
    (found,) = bench.run([case], bench.bench_for(torch.device("cuda"), 30, lambda: 1e9), {}, lambda verdict: None)
    assert found.verdict.wrong is None
    arms = {arm.name: arm for arm in found.verdict.arms}
    assert arms["graph"].gpu_us, arms["graph"].absent
    assert 0 < arms["voxfuse"].launches == arms["fused"].launches < arms["graph"].launches
    assert arms["eager"].launches is None or arms["fused"].launches < arms["eager"].launches
    assert arms["voxfuse"].host_us < arms["fused"].host_us


def test_casts_to_single_precision_keep_doubles_in_the_oracle():
    value = torch.tensor([1 + 1e-12], dtype=torch.float64)
    with decode_step_arms.InDoubles():
        kept = [value.float(), value.to(torch.float32), value.to(dtype=torch.float32), torch.tensor([1]).float()]
    assert [item.dtype for item in kept] == [torch.float64] * 4
    assert all(torch.equal(item, value) for item in kept[:3])
