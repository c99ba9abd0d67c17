"""The ledger: what acceptance asks for, by flipping one verdict at a time, and what becomes of a bad file."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verdicts import H200, measured

from voxfuse import records
from voxfuse.evidence import acceptance, ledger
from voxfuse.recompute import recompute

HOPPER, ADA = "9.0", "8.9"
FUSION = records.Fusion(
    name="adain_snake",
    stacks=("kokoro",),
    operations=("snake",),
    contract="same-precision",
    envelope="fp32",
    kernels=("adain",),
)


TIMES = {"win": (20.0, 10.0), "neutral": (10.0, 10.0), "loss": (8.0, 10.0)}  # µs of eager and voxfuse


def environment(capability: str | None, gpu: str | None = "NVIDIA H200") -> records.Environment:
    return msgspec.structs.replace(H200, compute_capability=capability, gpu=gpu)


def micro(
    outcome: records.Comparison | None = "win",
    *,
    name: str = "large",
    bytes_moved: int = 32_000,
    capability: str | None = HOPPER,
    day: int = 1,
    gpu: str = "NVIDIA H200",
    **changes: Any,
) -> records.MicroVerdict:
    """A verdict with the given outcome against eager (None: not compared), and a win against torch.compile."""
    verdict = measured(*TIMES[outcome or "win"], 15.0)
    ratios = tuple(ratio for ratio in verdict.ratios if outcome is not None or ratio.baseline != "eager")
    assert bytes_moved <= 32_000, "one launch is the floor, so that the speed of light stays what it is"
    signature = records.TensorSignature(shape=(1, bytes_moved), dtype="float32", strides=(bytes_moved, 1))
    case = records.Case(name=name, stack="kokoro", tensors={"x": signature})
    fields = {"case": case, "environment": environment(capability, gpu), "measured_at": f"2026-11-{day:02d}T10:00:00Z"}
    return msgspec.structs.replace(verdict, **(fields | {"ratios": ratios, "bytes_moved": bytes_moved} | changes))


GUARD = records.Guard(name="WER ceiling", value=1.0, limit=6.0, outcome="pass")
RECEIPT = records.Receipt(
    fusion=FUSION.name, stack="kokoro", target="m:C.forward", count=1, status="applied", backend="triton", process_id=1
)


def gate(
    verdict: records.GateOutcome = "pass", *, capability: str | None = HOPPER, day: int = 1, **changes: Any
) -> records.GateVerdict:
    record = records.GateVerdict(
        protocol="full",
        protocol_sha256="0" * 64,
        stack="kokoro",
        stack_version="0.9.4",
        weights="kokoro-v1.0 sha256:0",
        asr="tiny.en",
        normalizer_sha256=None,
        fusions=(FUSION.name, "other"),
        environment=environment(capability),
        workload={},
        repetitions=10,
        metrics=(),
        guards=(GUARD,),
        receipts=(RECEIPT,),
        utterances=(),
        verdict=verdict,
        reasons=("WER",),
        measured_at=f"2026-11-{day:02d}T12:00:00Z",
    )
    return msgspec.structs.replace(record, **changes)


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


def test_append_names_the_file_and_never_overwrites(tmp_path: Path) -> None:
    path = ledger.append(micro(), tmp_path)
    assert path == tmp_path / "nvidia-h200" / "micro-verdict-adain_snake-large-20261101T100000.json"
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="never overwritten"):
        ledger.append(micro("loss"), tmp_path)
    assert path.read_bytes() == before
    on_cpu = gate(environment=environment(None, None), protocol="../smoke test")
    assert ledger.append(on_cpu, tmp_path) == tmp_path / "cpu" / "gate-verdict-kokoro-smoke-test-20261101T120000.json"


def test_append_refuses_what_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not Fusion"):
        ledger.append(FUSION, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not an ISO 8601 time: 'today'"):
        ledger.append(micro(measured_at="today"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_appended_verdicts_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("VOXFUSE_LEDGER", str(tmp_path / "mine"))
    ledger.append(micro(day=1), tmp_path / "shipped")
    ledger.append(gate(day=2), tmp_path / "mine")
    assert [entry.verdict for entry in ledger.load()] == [micro(day=1), gate(day=2)]
    assert acceptance.accepted(FUSION, "kokoro", "0.9.4", HOPPER).accepted
    ledger.append(micro("loss", day=3), tmp_path / "mine")
    assert not acceptance.accepted(FUSION, "kokoro", "0.9.4", HOPPER).accepted


def test_a_rewritten_file_is_read_anew(tmp_path: Path) -> None:
    path = ledger.append(micro(), tmp_path)
    assert len(ledger.load([tmp_path])) == 1
    wrong = json.loads(records.to_json(recompute(msgspec.structs.replace(micro(), wrong="error"))))
    path.write_text(json.dumps(wrong))
    assert ledger.load([tmp_path])[0].verdict.wrong == "error"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{" + b'"a":{' * 100_000,
        records.to_json(FUSION),
        records.to_json(micro()).replace(b'"schema": 1', b'"schema": 99'),
        records.to_json(micro(measured_at="today")),
    ],
)
def test_a_bad_file_is_named_and_skipped(content: bytes, tmp_path: Path) -> None:
    ledger.append(micro(), tmp_path)
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.warns(ledger.LedgerWarning, match=r"skipped a record of the ledger: .*bad\.json"):
        entries = ledger.load([tmp_path])
    assert [entry.verdict for entry in entries] == [micro()]


def boasting() -> records.MicroVerdict:
    ratios = tuple(msgspec.structs.replace(ratio, median=9.0) for ratio in micro().ratios)
    return micro(ratios=ratios)


def test_a_record_that_does_not_follow_from_its_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adain_snake does not follow from its samples: ratio to eager: 9 claimed"):
        ledger.append(boasting(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    records.write(boasting(), tmp_path / "mine.json")
    with pytest.warns(ledger.LedgerWarning, match=r"mine\.json: it does not follow .*: ratio to eager: 9 claimed"):
        assert ledger.load([tmp_path]) == []
    assert ledger.read(tmp_path / "mine.json") == boasting()


def test_an_older_honest_record_counts_where_a_newer_one_boasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path)
    ledger.append(micro("loss", day=1), tmp_path)
    ledger.append(gate(), tmp_path)
    forged = msgspec.structs.replace(micro("loss", day=2), ratios=micro("win").ratios)
    records.write(forged, tmp_path / "forged.json")
    with pytest.warns(ledger.LedgerWarning, match="forged"):
        found = acceptance.accepted(FUSION, "kokoro", "0.9.4", HOPPER)
    assert not found.accepted and "lost to eager" in found.reason


def test_a_file_too_large_for_a_verdict_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.append(micro(), tmp_path)
    monkeypatch.setattr(ledger, "MAX_BYTES", 10)
    with pytest.warns(ledger.LedgerWarning, match="more than the 10"):
        assert ledger.load([tmp_path]) == []


def test_a_missing_user_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE_LEDGER", str(tmp_path / "absent"))
    with pytest.warns(ledger.LedgerWarning, match="absent does not exist: make it, or unset VOXFUSE_LEDGER"):
        ledger.load()


def test_every_shipped_record_reads() -> None:
    files = list(ledger.SHIPPED.rglob("*.json"))
    assert len(ledger.load([ledger.SHIPPED])) == len(files)
