"""What the ledger's verdicts allow ``apply_patches()`` to turn on.

A fusion is *accepted* on a stack and a GPU (by compute capability) when both judges say so:

micro
    Over the newest micro verdict of every case of the fusion on that stack, per GPU model: none is ``wrong``, each was
    compared with the arm ``eager`` (what the stack itself runs), none lost to it, and every *large* case won. A case
    is large when it moves at least half the bytes of the largest case; small cases may be neutral. Of a fusion that
    replays graphs, the blocks of the newest passed gate say it instead: the whole set must be faster than the set
    without it (of one fusion alone: than untouched code), the lower 95 % limit above 1.
end to end
    The newest decisive gate verdict per GPU model whose fusions include it is a pass. Decisive are a ``fail`` of the
    protocol ``full``, and a ``pass`` of it with real weights, passed guards and kernels that ran (receipts of backend
    ``triton``). It must be of the same release series of the stack (equal but for the last version component: 0.9.4
    speaks for 0.9.*; the patches' source hashes guard the code itself). Where no real weights were to be had
    (``weights`` begins with ``random``) the newest verdict that decided nothing but whose fidelity guards (names
    beginning with ``fidelity``) all passed counts as ``fidelity-only``; a pass outranks it, a failure refuses it.

A fusion of contract ``reduced`` needs a gate verdict of its own, with no other fusion on.

A GPU on which nothing was measured for the fusion and stack, and the reference backend on a CPU, follow the GPUs where
it is accepted, if its contract is ``bitwise`` or ``same-precision``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from voxfuse import records
from voxfuse.evidence.ledger import Entry, load, moment
from voxfuse.records import GateVerdict, MicroVerdict

OWN_BASELINE = "eager"
NO_REAL_WEIGHTS = "random"
DECISIVE_PROTOCOL = "full"
FIDELITY_GUARDS = "fidelity"
RESAMPLES = 10_000
LARGE_SHARE = 0.5  # of the bytes that the largest case moves

VerdictT = TypeVar("VerdictT", MicroVerdict, GateVerdict)


class Acceptance(NamedTuple):
    """Whether ``policy="proven"`` may turn a fusion on, and why. ``fidelity_only``: no real weights were judged."""

    accepted: bool
    reason: str
    fidelity_only: bool = False


class Finding(NamedTuple):
    """What one judge says: True or False, or None where it was not asked."""

    passed: bool | None
    reason: str
    fidelity_only: bool = False


def accepted(
    fusion: records.Fusion,
    stack: str,
    stack_version: str,
    compute_capability: str | None,
    entries: list[Entry] | None = None,
) -> Acceptance:
    """Whether a fusion is accepted on a stack release and a compute capability ("9.0"; None on a CPU).

    ``entries`` stands for ``load()``. The rule is in the module's docstring.
    """
    verdicts = [entry.verdict for entry in (load() if entries is None else entries)]
    micros = [verdict for verdict in verdicts if isinstance(verdict, MicroVerdict)]
    micros = [verdict for verdict in micros if verdict.fusion == fusion.name and verdict.case.stack == stack]
    gates = [verdict for verdict in verdicts if isinstance(verdict, GateVerdict)]
    gates = [verdict for verdict in gates if verdict.stack == stack and fusion.name in verdict.fusions]
    if fusion.contract == "reduced":  # must pass by itself: in company, others could hide its harm
        gates = [verdict for verdict in gates if verdict.fusions == (fusion.name,)]

    capabilities = {verdict.environment.compute_capability for verdict in micros}
    capabilities |= {verdict.environment.compute_capability for verdict in gates}
    measured = sorted(name for name in capabilities if name is not None)
    if compute_capability in measured:
        return _accepted_on(fusion, stack, stack_version, compute_capability, micros, gates)

    here = "a CPU" if compute_capability is None else f"compute capability {compute_capability}"
    elsewhere = {name: _accepted_on(fusion, stack, stack_version, name, micros, gates) for name in measured}
    proven = {name: acceptance for name, acceptance in elsewhere.items() if acceptance.accepted}
    if not proven:
        found = "; ".join(f"on {name}: {acceptance.reason}" for name, acceptance in elsewhere.items())
        return Acceptance(False, f"no record of {fusion.name} on {stack} for {here}" + (f"; {found}" if found else ""))
    if fusion.contract == "reduced":
        return Acceptance(False, f"accepted on {', '.join(proven)}, but contract 'reduced' needs a record for {here}")
    fidelity_only = all(acceptance.fidelity_only for acceptance in proven.values())
    return Acceptance(
        True, f"no record for {here}; accepted on {', '.join(proven)}, contract {fusion.contract}", fidelity_only
    )


def _accepted_on(
    fusion: records.Fusion,
    stack: str,
    stack_version: str,
    compute_capability: str | None,
    micros: list[MicroVerdict],
    gates: list[GateVerdict],
) -> Acceptance:
    here = [
        verdict
        for verdict in gates
        if verdict.environment.compute_capability == compute_capability
        and _series(verdict.stack_version) == _series(stack_version)
    ]
    gate = _gate(here)
    if fusion.graph:
        if gate.passed is False:
            return Acceptance(False, gate.reason)
        speed = graph_finding(fusion.name, here)
    else:
        speed = micro_finding(
            [verdict for verdict in micros if verdict.environment.compute_capability == compute_capability]
        )
    if not speed.passed:
        return Acceptance(False, speed.reason)
    if gate.passed is None:
        return Acceptance(
            False,
            f"{speed.reason}, but no gate verdict with {fusion.name} on {stack} {_series(stack_version)}.*: "
            f"voxfuse gate --stack {stack}",
        )
    return Acceptance(gate.passed, f"{speed.reason}; {gate.reason}", gate.fidelity_only)


def graph_finding(fusion: str, gates: list[GateVerdict]) -> Finding:
    """What the blocks of the newest passed gate on each GPU model say of a fusion that replays graphs."""
    passed = [verdict for verdict in gates if verdict.verdict == "pass" and _is_decisive(verdict)]
    gains = []
    for verdict in _newest(passed, key=lambda verdict: verdict.environment.gpu):
        gain = leave_one_out_gain(verdict, fusion)
        if gain is None:
            return Finding(None, f"no timed blocks with and without {fusion} in the gate of {verdict.measured_at}")
        median, low, high = gain
        if not low > 1:
            return Finding(False, f"with {fusion} ×{median:.3f} [{low:.3f}, {high:.3f}]: no gain")
        gains.append(f"×{median:.2f}")
    if not gains:
        return Finding(None, f"no passed gate with {fusion}")
    return Finding(True, f"the gate's blocks gain {', '.join(gains)} with it")


def leave_one_out_gain(verdict: GateVerdict, fusion: str) -> tuple[float, float, float] | None:
    """Throughput of the whole set over that of the set without a fusion, both against untouched code: ratio of the
    medians, and the bootstrap's 95 % limits. Without its only fusion a set is untouched code. None where either was not
    timed, or a block holds no time or no audio."""
    whole = _throughput_ratios(verdict, "a/b")
    rest = np.ones(1) if verdict.fusions == (fusion,) else _throughput_ratios(verdict, f"without:{fusion}")
    if not all(values.size and np.isfinite(values).all() for values in (whole, rest)):
        return None
    random = np.random.default_rng(0)
    medians = [np.median(random.choice(values, (RESAMPLES, values.size)), axis=1) for values in (whole, rest)]
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return float(np.median(whole) / np.median(rest)), float(low), float(high)


def _throughput_ratios(verdict: GateVerdict, kind: str) -> np.ndarray:
    """Patched over untouched audio seconds per second of each block; NaN where one holds no time or no audio."""
    blocks = [block for block in verdict.blocks if block.kind == kind]
    parts = [(b.patched_audio_s, b.baseline_wall_s, b.patched_wall_s, b.baseline_audio_s) for b in blocks]
    sums = np.array([[sum(part) for part in block] for block in parts], dtype=np.float64).reshape(-1, 4)
    sums[sums <= 0] = np.nan
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        return sums[:, 0] / sums[:, 2] * (sums[:, 1] / sums[:, 3])


def micro_finding(verdicts: list[MicroVerdict]) -> Finding:
    """What the micro judge says of a fusion on one stack and one compute capability; the rule's first half."""
    newest = _newest(verdicts, key=lambda verdict: (verdict.environment.gpu, msgspec.json.encode(verdict.case)))
    if not newest:
        return Finding(None, "no micro verdict")
    largest = max(verdict.bytes_moved for verdict in newest)
    wins = 0
    for verdict in newest:
        name = verdict.case.name
        if verdict.wrong is not None:
            return Finding(False, f"micro verdict wrong on case {name}: {verdict.wrong}")
        against = {ratio.baseline: ratio.verdict for ratio in verdict.ratios}.get(OWN_BASELINE)
        if against is None:
            return Finding(False, f"micro verdict on case {name} has no comparison with {OWN_BASELINE!r}")
        if against == "loss":
            return Finding(False, f"micro verdict lost to {OWN_BASELINE} on case {name}")
        if against == "neutral" and verdict.bytes_moved >= LARGE_SHARE * largest:
            return Finding(False, f"micro verdict only neutral on the large case {name}")
        wins += against == "win"
    return Finding(True, f"micro verdict wins on {wins} of {len(newest)} cases")


def _gate(verdicts: list[GateVerdict]) -> Finding:
    decisive = [verdict for verdict in verdicts if verdict.verdict in ("pass", "fail") and _is_decisive(verdict)]
    for verdict in (newest := _newest(decisive, key=lambda verdict: verdict.environment.gpu)):
        if verdict.verdict == "fail":
            reasons = "; ".join(verdict.reasons) or "no reason given"
            return Finding(False, f"gate failed ({verdict.protocol}, {verdict.measured_at}): {reasons}")
    if newest:
        return Finding(True, f"gate passed ({newest[-1].protocol}, {newest[-1].measured_at})")
    unweighted = [verdict for verdict in verdicts if verdict.weights.startswith(NO_REAL_WEIGHTS)]
    for verdict in (newest := _newest(unweighted, key=lambda verdict: verdict.environment.gpu)):
        fidelity = [guard for guard in verdict.guards if guard.name.startswith(FIDELITY_GUARDS)]
        if not fidelity or any(guard.outcome != "pass" for guard in fidelity):
            return Finding(False, f"fidelity tier not passed ({verdict.protocol}, {verdict.measured_at})")
    if newest:
        return Finding(True, "fidelity tier passed, no real weights", fidelity_only=True)
    return Finding(None, "no gate verdict")


def _is_decisive(verdict: GateVerdict) -> bool:
    """Whether a gate verdict decides: of the full protocol; a pass also needs passed guards, real weights and kernels
    that ran."""
    if verdict.protocol != DECISIVE_PROTOCOL:
        return False
    if verdict.verdict == "fail":
        return True
    sound = bool(verdict.guards) and all(guard.outcome == "pass" for guard in verdict.guards)
    fused = any(receipt.backend == "triton" for receipt in verdict.receipts if receipt.status == "applied")
    return sound and fused and not verdict.weights.startswith(NO_REAL_WEIGHTS)


def _newest(verdicts: list[VerdictT], key: Callable[[VerdictT], Hashable]) -> list[VerdictT]:
    return list({key(verdict): verdict for verdict in sorted(verdicts, key=moment)}.values())


def _series(version: str) -> str:
    """A version without its last component and local part: 0.9 of 0.9.4+local."""
    public = version.partition("+")[0]
    return public.rpartition(".")[0] or public
