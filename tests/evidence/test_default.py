"""The ledger decides what ``apply_patches()`` turns on: flipping one verdict flips the default."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from toystack import ToyStack
from verdicts import H200, verdict

from voxfuse.evidence import ledger
from voxfuse.patches import PatchWarning, policy
from voxfuse.patches.engine import apply_patches
from voxfuse.records import Case, GateVerdict, Guard, Receipt


def micro(outcome: str, day: int) -> ledger.Verdict:
    eager = {"win": 20.0, "neutral": 10.0, "loss": 8.0}[outcome]
    case = Case(name="large", stack="toyvoice", tensors={})
    when = f"2026-11-{day:02d}T10:00:00Z"
    return verdict(eager_us=eager, voxfuse_us=10.0, fusion="toy_norm", case=case, measured_at=when)


def gate(outcome: str, day: int) -> GateVerdict:
    guard = Guard(name="WER ceiling", value=1.0, limit=6.0, outcome=outcome)  # type: ignore[arg-type]
    receipt = Receipt(
        fusion="toy_norm", stack="toyvoice", target="t", count=1, status="applied", backend="triton", process_id=1
    )
    return GateVerdict(
        protocol="full",
        protocol_sha256="0" * 64,
        stack="toyvoice",
        stack_version="1.2",
        weights="real",
        asr=None,
        normalizer_sha256=None,
        fusions=("toy_norm",),
        environment=H200,
        workload={},
        repetitions=1,
        metrics=(),
        guards=(guard,),
        receipts=(receipt,),
        utterances=(),
        verdict=outcome,  # type: ignore[arg-type]
        reasons=(),
        measured_at=f"2026-11-{day:02d}T12:00:00Z",
    )


@pytest.fixture
def book(tmp_path: Path, toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ledger of this process, on an H200 as far as the policy knows."""
    folder = tmp_path / "book"
    folder.mkdir()
    monkeypatch.setattr(ledger, "SHIPPED", folder)
    monkeypatch.setattr(policy, "compute_capability", lambda: "9.0")
    return folder


def default() -> str:
    """What ``apply_patches`` does with toy_norm when nothing is asked for."""
    with apply_patches("toyvoice", backend="reference") as patches:
        return str(patches.receipts[0].status)


def test_flipping_a_verdict_flips_the_default(book: Path) -> None:
    with pytest.warns(PatchWarning, match="no fusion of toyvoice is proven here"):
        assert default() == "skipped"
    ledger.append(micro("win", 1), book)
    with pytest.warns(PatchWarning):
        assert default() == "skipped"  # the gate has not spoken
    ledger.append(gate("pass", 1), book)
    assert default() == "applied"
    for flip, back in ((micro("loss", 2), micro("win", 3)), (micro("neutral", 4), micro("win", 5))):
        ledger.append(flip, book)
        with pytest.warns(PatchWarning):
            assert default() == "skipped"
        ledger.append(back, book)
        assert default() == "applied"
    ledger.append(gate("fail", 2), book)
    with pytest.warns(PatchWarning):
        assert default() == "skipped"
    ledger.append(gate("pass", 3), book)
    assert default() == "applied"


def test_a_wrong_verdict_and_a_forged_one(book: Path) -> None:
    ledger.append(micro("win", 1), book)
    ledger.append(gate("pass", 1), book)
    ledger.append(msgspec.structs.replace(micro("win", 2), wrong="error", ratios=(), arms=()), book)
    with pytest.warns(PatchWarning):
        assert default() == "skipped"
    forged = msgspec.structs.replace(micro("loss", 3), ratios=micro("win", 3).ratios)  # type: ignore[union-attr]
    path = book / "forged.json"
    path.write_bytes(ledger.records.to_json(forged))
    with pytest.warns((PatchWarning, ledger.LedgerWarning)):
        assert default() == "skipped"
