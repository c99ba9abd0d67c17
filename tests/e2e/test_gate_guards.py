"""Single guards of the gate: peak memory with its allowance, and which fusions fired."""

import msgspec
import pytest

from voxfuse.e2e import guards
from voxfuse.e2e.protocol import ThroughputRules, load_protocol
from voxfuse.records import Receipt

GIB = 2**30


def rules(**changes: float) -> ThroughputRules:
    return msgspec.structs.replace(load_protocol("smoke").protocol.throughput, **changes)


@pytest.mark.parametrize(
    ("baseline", "patched", "allowance", "outcome", "limit"),
    [
        (10 * GIB, 10 * GIB, 0, "pass", 0.05),
        (10 * GIB, int(10.4 * GIB), 0, "pass", 0.05),
        (10 * GIB, int(10.6 * GIB), 0, "fail", 0.05),
        (10 * GIB, 12 * GIB, 2 * GIB, "pass", 0.2),  # what captured graphs may keep
        (10 * GIB, 12 * GIB + 1, 2 * GIB, "fail", 0.2),
        (GIB, 3 * GIB, 2 * GIB, "pass", 2.0),  # of a small stack it is a multiple
        (80 * GIB, 83 * GIB, 2 * GIB, "pass", 0.05),  # of a large one the tolerance is more than the allowance
        (80 * GIB, 85 * GIB, 2 * GIB, "fail", 0.05),
        (10 * GIB, 9 * GIB, 0, "pass", 0.05),
    ],
)
def test_peak_memory_within_the_tolerance_or_the_allowance(
    baseline: int, patched: int, allowance: int, outcome: str, limit: float
) -> None:
    guard = guards.peak_memory(baseline, patched, rules(tolerance=0.05, memory_allowance_bytes=allowance), "no GPU")
    assert (guard.outcome, guard.limit) == (outcome, pytest.approx(limit))
    assert guard.value == pytest.approx(patched / baseline - 1)


def test_peak_memory_says_how_much() -> None:
    guard = guards.peak_memory(10 * GIB, 11 * GIB, rules(), "no GPU")
    assert guard.detail == "+10.0 %, +1024 MiB"


@pytest.mark.parametrize("measured", [(None, GIB), (GIB, None), (None, None), (0, GIB)])
def test_peak_memory_that_was_not_measured_is_not_judged(measured: tuple[int | None, int | None]) -> None:
    guard = guards.peak_memory(*measured, rules(), "not measured")
    assert (guard.outcome, guard.value, guard.detail) == ("not-judged", None, "not measured")


def receipt(fusion: str, target: str, calls: int, **changes: object) -> Receipt:
    made = Receipt(fusion=fusion, stack="kokoro", target=target, count=1, status="applied", calls=calls, process_id=1)
    return msgspec.structs.replace(made, **changes)


def fired(*found: Receipt, fusions: tuple[str, ...] = ("graph",)) -> tuple[str, str]:
    guard = next(guard for guard in guards.receipts(found, fusions) if guard.name == "fusions fired")
    return guard.outcome, guard.detail


def test_a_fusion_has_fired_where_any_of_its_targets_was_called() -> None:
    assert fired(receipt("graph", "Decoder", 5), receipt("graph", "Generator", 0)) == ("pass", "graph: 5 calls")
    assert fired(receipt("graph", "Decoder", 0), receipt("graph", "Generator", 3))[0] == "pass"
    assert fired(receipt("graph", "Decoder", 0), receipt("graph", "Generator", 0)) == ("fail", "graph: never called")


def test_one_fusion_s_calls_do_not_speak_for_another() -> None:
    found = (receipt("graph", "Decoder", 5), receipt("snake", "Block", 0))
    assert fired(*found, fusions=("graph", "snake")) == ("fail", "snake: never called")


def test_what_was_not_applied_has_not_fired() -> None:
    skipped = receipt("snake", "Block", 7, status="skipped", reason="fusion conv serves this target")
    assert fired(receipt("conv", "Block", 5), skipped, fusions=("conv", "snake")) == ("fail", "snake: not applied")
    assert fired(fusions=("graph",)) == ("fail", "graph: not applied")
    assert fired(receipt("graph", "Decoder", 5), fusions=())[0] == "fail"


def test_a_fallback_on_any_target_counts() -> None:
    found = (receipt("graph", "Decoder", 5), receipt("graph", "Generator", 0, fallbacks={"too long": 2}))
    guard = next(guard for guard in guards.receipts(found, ("graph",)) if guard.name == "no fallback")
    assert (guard.outcome, guard.value, guard.detail) == ("fail", 1, "graph on Generator: 2× too long")
