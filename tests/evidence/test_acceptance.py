"""What acceptance asks for, by flipping one verdict at a time."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from verdicts import ADA, FUSION, GUARD, HOPPER, RECEIPT, environment, gate, micro

from voxfuse import records
from voxfuse.evidence import acceptance, ledger


def judge(
    *verdicts: ledger.Verdict, capability: str | None = HOPPER, version: str = "0.9.4", fusion: records.Fusion = FUSION
) -> acceptance.Acceptance:
    entries = [ledger.Entry(Path("x"), verdict) for verdict in verdicts]
    return acceptance.accepted(fusion, "kokoro", version, capability, entries)


PROVEN = (micro(), micro("neutral", name="small", bytes_moved=15_999), gate())


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "lax"},
        {"protocol": "full, 7 sentences"},
        {"guards": ()},
        {"guards": (GUARD, msgspec.structs.replace(GUARD, outcome="fail"))},
        {"receipts": ()},
        {"receipts": (msgspec.structs.replace(RECEIPT, backend="reference"),)},
        {"weights": "random, seed 0"},
    ],
)
def test_a_pass_that_proves_nothing_does_not_count(changes: dict[str, Any]) -> None:
    assert not judge(micro(), gate(**changes)).accepted
    assert not judge(micro(), gate("fail", day=1), gate(day=2, **changes)).accepted


def test_a_failed_smoke_run_does_not_outrank_a_full_pass() -> None:
    assert judge(*PROVEN, gate("fail", day=2, protocol="smoke")).accepted


def test_both_judges_agreeing_is_accepted() -> None:
    found = judge(*PROVEN)
    assert found.accepted and not found.fidelity_only
    assert found.reason == "micro verdict wins on 1 of 2 cases; gate passed (full, 2026-11-01T12:00:00Z)"


def test_an_empty_ledger_accepts_nothing() -> None:
    for capability in (HOPPER, None):
        found = judge(capability=capability)
        assert not found.accepted
        assert "no record of adain_snake on kokoro" in found.reason


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ((micro("loss"), gate()), "lost to eager on case large"),
        ((micro("neutral"), gate()), "only neutral on the large case large"),
        ((micro(), micro("neutral", name="half", bytes_moved=16_000), gate()), "only neutral on the large case half"),
        ((micro(), micro("loss", name="small", bytes_moved=10), gate()), "lost to eager on case small"),
        ((micro(), micro(name="small", bytes_moved=10, wrong="error 2e-3"), gate()), "wrong on case small: error 2e-3"),
        ((micro(None), gate()), "no comparison with 'eager'"),
        ((micro(),), "no gate verdict with adain_snake on kokoro 0.9.*: voxfuse gate --stack kokoro"),
        ((gate(),), "no micro verdict"),
        ((micro(), gate("fail")), "gate failed (full, 2026-11-01T12:00:00Z): WER"),
        ((micro(), gate("inconclusive")), "no gate verdict"),
        ((micro(), gate("not-judged")), "no gate verdict"),
        ((micro(), gate(fusions=("other",))), "no gate verdict"),
        ((micro(), gate(stack="mimi")), "no gate verdict"),
        ((micro(), gate(stack_version="0.8.4")), "no gate verdict"),
        ((micro(), gate(capability=None)), "no gate verdict"),
        ((micro(fusion="other"), gate()), "no micro verdict"),
    ],
)
def test_one_flipped_verdict_refuses(verdicts: tuple[ledger.Verdict, ...], reason: str) -> None:
    found = judge(*verdicts)
    assert not found.accepted
    assert reason in found.reason


def test_the_newest_verdict_of_a_case_counts_in_either_direction() -> None:
    assert judge(micro("loss", day=1), micro("win", day=2), gate()).accepted
    assert not judge(micro("loss", day=3), micro("win", day=2), gate()).accepted
    assert judge(micro(), gate("fail", day=1), gate("pass", day=2)).accepted
    assert not judge(micro(), gate("fail", day=3), gate("pass", day=2)).accepted


def test_an_undecided_gate_does_not_take_an_older_pass_away() -> None:
    assert judge(micro(), gate("pass", day=1), gate("inconclusive", day=2)).accepted


def test_gpus_of_one_capability_must_all_agree() -> None:
    assert not judge(micro("loss", day=1, gpu="NVIDIA H100"), micro("win", day=2), gate()).accepted


def test_a_verdict_speaks_for_its_release_series() -> None:
    assert judge(*PROVEN, version="0.9.2").accepted
    assert judge(*PROVEN, version="0.9.5+local.1").accepted
    assert not judge(*PROVEN, version="0.10.0").accepted


def test_a_gpu_without_records_follows_where_it_is_proven() -> None:
    for capability in (ADA, None):
        found = judge(*PROVEN, capability=capability)
        assert found.accepted
        assert "accepted on 9.0" in found.reason
    for contract in ("bitwise", "reduced"):
        fusion = msgspec.structs.replace(FUSION, contract=contract)
        alone = gate(fusions=(FUSION.name,))
        found = judge(micro(), alone, capability=ADA, fusion=fusion)
        assert found.accepted == (contract == "bitwise")
    assert "needs a record for compute capability 8.9" in found.reason


def test_own_records_outrank_those_of_other_gpus() -> None:
    assert not judge(*PROVEN, micro("loss", capability=ADA), capability=ADA).accepted
    found = judge(*PROVEN, micro(capability=ADA), capability=ADA)
    assert not found.accepted and "no gate verdict" in found.reason


def test_measurements_on_a_cpu_prove_nothing() -> None:
    assert not judge(micro(capability=None), gate(capability=None), capability=None).accepted


def test_reduced_precision_must_pass_alone() -> None:
    reduced = msgspec.structs.replace(FUSION, contract="reduced")
    assert not judge(*PROVEN, fusion=reduced).accepted
    assert judge(*PROVEN, gate(fusions=(FUSION.name,)), fusion=reduced).accepted


def fidelity(outcome: records.GateOutcome, day: int = 1, **changes: Any) -> records.GateVerdict:
    guard = records.Guard(name="fidelity, worst", value=80.0, limit=60.0, outcome=outcome)
    return gate("not-judged", day=day, **({"weights": "random, seed 0", "guards": (guard,)} | changes))


def test_fidelity_alone_counts_only_where_no_real_weights_exist() -> None:
    found = judge(micro(), fidelity("pass"))
    assert found.accepted and found.fidelity_only
    assert not judge(micro(), fidelity("pass", weights="kokoro-v1.0 sha256:0")).accepted
    assert not judge(micro(), fidelity("fail")).accepted
    assert not judge(micro(), fidelity("pass", day=1), fidelity("fail", day=2)).accepted
    assert not judge(micro(), fidelity("pass", guards=())).accepted
    assert not judge(micro(), fidelity("pass"), gate("fail")).accepted
    assert not judge(micro(), fidelity("pass", day=2), gate("pass", day=1)).fidelity_only
    elsewhere = judge(micro(), fidelity("pass"), capability=ADA)
    assert elsewhere.accepted and elsewhere.fidelity_only


GRAPH = msgspec.structs.replace(FUSION, graph=True)


def blocks(kind: str, speedup: float, count: int = 10, noise: float = 0.01, seed: int = 0) -> tuple[records.Block, ...]:
    """Timed pairs in which the patched arm speaks ``speedup`` times as fast as the untouched one."""
    random = np.random.default_rng(seed)
    return tuple(
        records.Block(
            kind=kind,
            index=index,
            first="baseline",
            baseline_wall_s=(0.3, 0.5),
            patched_wall_s=tuple(wall / speedup * random.normal(1, noise) for wall in (0.3, 0.5)),
            baseline_audio_s=(3.0, 4.0),
            patched_audio_s=(3.0, 4.0),
        )
        for index in range(count)
    )


def graph_gate(whole: float, rest: float, outcome: records.GateOutcome = "pass", **changes: Any) -> records.GateVerdict:
    """A gate of the graph beside another fusion: the whole set's speed-up, and the one without the graph."""
    timed = blocks("a/b", whole) + blocks(f"without:{FUSION.name}", rest, seed=1)
    return gate(outcome, **({"blocks": timed} | changes))


def test_a_graph_is_on_by_the_blocks_without_it() -> None:
    found = judge(graph_gate(1.5, 1.2), fusion=GRAPH)  # no micro verdict at all
    assert found.accepted and "the gate's blocks gain ×1.25 with it; gate passed" in found.reason
    median, low, high = acceptance.leave_one_out_gain(graph_gate(1.5, 1.2), FUSION.name) or (0.0, 0.0, 0.0)
    assert median == pytest.approx(1.25, abs=0.01) and 1.23 < low < median < high < 1.27
    assert not judge(graph_gate(1.5, 1.2)).accepted  # a fusion that is no graph needs its micro verdicts


@pytest.mark.parametrize(
    ("verdicts", "reason"),
    [
        ((graph_gate(1.5, 1.5),), "no gain"),
        ((graph_gate(1.2, 1.5),), "×0.80"),
        ((gate(blocks=blocks("a/b", 1.5)),), "no timed blocks with and without adain_snake in the gate of 2026-11-01"),
        ((gate(),), "no timed blocks"),
        ((graph_gate(1.5, 1.2, blocks=blocks("without:adain_snake", 1.2)),), "no timed blocks"),
        ((graph_gate(1.5, 1.2, protocol="smoke"),), "no passed gate with adain_snake"),
        ((graph_gate(1.5, 1.2, "inconclusive"),), "no passed gate"),
        ((graph_gate(1.5, 1.2, "fail"),), "gate failed (full"),
        ((graph_gate(1.5, 1.2), graph_gate(1.5, 1.2, "fail", day=2)), "gate failed (full"),
        ((graph_gate(1.5, 1.2), graph_gate(1.5, 1.5, day=2)), "no gain"),
        ((graph_gate(1.5, 1.2), graph_gate(1.5, 1.5, environment=environment(HOPPER, "NVIDIA H100"))), "no gain"),
        ((micro(), micro(name="small")), "no passed gate"),
    ],
)
def test_a_graph_without_a_gain_of_its_own_is_off(verdicts: tuple[ledger.Verdict, ...], reason: str) -> None:
    found = judge(*verdicts, fusion=GRAPH)
    assert not found.accepted and reason in found.reason


def test_a_graph_judged_alone_is_compared_with_untouched_code() -> None:
    for speedup in (1.3, 1.0):
        alone = gate(fusions=(FUSION.name,), blocks=blocks("a/b", speedup))
        assert judge(alone, fusion=GRAPH).accepted == (speedup > 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"patched_wall_s": ()},
        {"patched_wall_s": (0.0, 0.0)},
        {"baseline_audio_s": (0.0,)},
        {"baseline_wall_s": (-1.0,)},
        {"patched_audio_s": (1e308, 1e308)},
    ],
)
@pytest.mark.parametrize("kind", ["a/b", "without:adain_snake"])
def test_a_block_without_time_or_audio_says_nothing(changes: dict[str, Any], kind: str) -> None:
    timed = graph_gate(1.5, 1.2).blocks
    broken = msgspec.structs.replace(next(block for block in timed if block.kind == kind), index=99, **changes)
    found = judge(graph_gate(1.5, 1.2, blocks=(*timed, broken)), fusion=GRAPH)
    assert not found.accepted and "no timed blocks" in found.reason
