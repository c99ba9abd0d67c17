"""The guards: every condition that a gate declares before the run, judged from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from voxfuse.e2e.protocol import FidelityRules, Protocol, RowRules, ThroughputRules, WerRules
from voxfuse.e2e.statistics import MedianRatio, NonInferiority
from voxfuse.records import ArmUtterance, GateOutcome, Guard, Receipt, Utterance

NAMED = 3  # how many offenders a guard's detail names
ORACLE_RATIO, ORACLE_FLOOR = 1.25, 2.0**-23  # the contract same-precision: times eager's error, or one fp32 unit


def verdict_of(guards: Iterable[Guard]) -> tuple[GateOutcome, tuple[str, ...]]:
    """The worst outcome of the guards (fail, inconclusive, not-judged, pass), and the reasons, those alike in one."""
    found = list(guards)
    order: tuple[GateOutcome, ...] = ("fail", "inconclusive", "not-judged")
    outcome: GateOutcome = "pass"
    for item in reversed(order):
        if any(guard.outcome == item for guard in found):
            outcome = item
    named: dict[tuple[GateOutcome, str], list[str]] = {}
    for item in order:
        for guard in found:
            if guard.outcome == item:
                named.setdefault((item, guard.detail), []).append(guard.name)
    reasons = tuple(f"{item}: {', '.join(names)}: {detail}" for (item, detail), names in named.items())
    return outcome, reasons


def fidelity_violation(
    baseline: ArmUtterance,
    patched: ArmUtterance,
    snr_db: float | None,
    log_spectrum_l1: float | None,
    rules: FidelityRules,
) -> str | None:
    """How one pair breaks a worst-case bound of the fidelity tier, or None; failing in both arms breaks none."""
    if baseline.audio_sha256 == patched.audio_sha256:
        return None
    if patched.audio_sha256 is None or baseline.audio_sha256 is None:
        arm, silent = ("patched", patched) if patched.audio_sha256 is None else ("untouched", baseline)
        return f"no audio in the {arm} arm: {silent.failure}"
    if snr_db is None or log_spectrum_l1 is None:
        return f"lasts {patched.audio_s:.4f} s against {baseline.audio_s:.4f} s"
    if snr_db < rules.snr_db_worst:
        return f"SNR {snr_db:.1f} dB is below {rules.snr_db_worst:g} dB (log-spectrum L1 {log_spectrum_l1:.4f})"
    if log_spectrum_l1 > rules.log_spectrum_l1_worst:
        return f"log-spectrum L1 {log_spectrum_l1:.4f} is above {rules.log_spectrum_l1_worst:g} (SNR {snr_db:.1f} dB)"
    return None


def completeness(spoken: int, expected: int, stopped_early: bool) -> Guard:
    """Everything that the protocol asks for was spoken, or stopping early had already decided the verdict."""
    detail = f"{spoken} of {expected} pairs spoken"
    if spoken == expected:
        return Guard(name="complete", value=spoken, limit=expected, outcome="pass", detail=detail)
    if stopped_early:
        return Guard(
            name="complete", value=spoken, limit=expected, outcome="not-judged", detail=f"{detail}: stopped by fidelity"
        )
    return Guard(
        name="complete",
        value=spoken,
        limit=expected,
        outcome="inconclusive",
        detail=f"{detail}: run the gate again on this folder to resume",
    )


def fidelity(utterances: Sequence[Utterance], rules: FidelityRules) -> list[Guard]:
    """Tier 0: the worst case per utterance, and the medians over utterances that are not identical."""
    broken = {}
    for item in utterances:
        reason = fidelity_violation(item.baseline, item.patched, item.snr_db, item.log_spectrum_l1, rules)
        if reason is not None:
            broken[item.id] = reason
    compared = [item for item in utterances if item.baseline.audio_sha256 and item.patched.audio_sha256]
    identical = sum(item.baseline.audio_sha256 == item.patched.audio_sha256 for item in compared)
    same = f"{identical} of {len(compared)} bit-identical"
    worst: GateOutcome = "fail" if broken else "pass" if compared else "inconclusive"
    guards = [
        Guard(name="fidelity, worst", value=len(broken), limit=0, outcome=worst, detail=_offenders(broken) or same)
    ]
    ratios = [item.snr_db for item in utterances if item.snr_db is not None]
    distances = [item.log_spectrum_l1 for item in utterances if item.log_spectrum_l1 is not None]
    for name, values, limit, sign in (
        ("fidelity, median SNR", ratios, rules.snr_db_median, 1),
        ("fidelity, median log-spectrum L1", distances, rules.log_spectrum_l1_median, -1),
    ):
        outcome: GateOutcome = "pass" if identical else "inconclusive"
        median = float(np.median(values)) if values else None
        if median is not None:
            outcome = "pass" if sign * median >= sign * limit else "fail"
        guards.append(
            Guard(name=name, value=median, limit=limit, outcome=outcome, detail=f"{len(values)} differ, {same}")
        )
    return guards


def oracle(utterances: Sequence[Utterance]) -> list[Guard]:
    """No guard where no output was compared with fp64; else the error of the patched arm, root mean square over the
    utterances, against that of the untouched one: contract ``same-precision``."""
    found = [(item.baseline.oracle_snr_db, item.patched.oracle_snr_db) for item in utterances]
    pairs = [(base, patched) for base, patched in found if base is not None and patched is not None]
    if not pairs:
        return []
    base, patched = (float(np.sqrt(np.mean(10 ** (-np.array(arm) / 10)))) for arm in zip(*pairs, strict=True))
    ratio, sound = patched / base, patched <= max(ORACLE_RATIO * base, ORACLE_FLOOR)
    detail = f"{len(pairs)} pairs, relative error {patched:.3g} patched, {base:.3g} untouched, against fp64"
    return [
        Guard(
            name="fidelity, fp64 oracle",
            value=ratio,
            limit=ORACLE_RATIO,
            outcome="pass" if sound else "fail",
            detail=detail,
        )
    ]


def rows_valid(utterances: Sequence[Utterance], transcribed: bool) -> Guard:
    """Every output of both arms is valid audio and, where it was transcribed, could be read."""
    broken = {
        f"{item.id} ({arm})": output.failure or "no transcript"
        for item in utterances
        for arm, output in (("untouched", item.baseline), ("patched", item.patched))
        if output.failure is not None or (transcribed and output.hypothesis is None)
    }
    return Guard(
        name="every output valid",
        value=len(broken),
        limit=0,
        outcome="fail" if broken else "pass",
        detail=_offenders(broken) or f"{2 * len(utterances)} outputs",
    )


def new_faults(utterances: Sequence[Utterance], rules: RowRules, transcribed: bool) -> list[Guard]:
    """Zero outputs with a fault that the untouched arm's output of the same text does not have."""
    faults: dict[str, Callable[[Utterance, ArmUtterance], bool]] = {
        "new failures": lambda _, output: output.failure is not None,
        "new runaways": lambda item, output: is_runaway(item, output, rules),
        "new silence": lambda _, output: output.rms is not None and output.rms < rules.silence_rms,
        "new NaN": lambda _, output: output.nonfinite > 0,
        "new clipping": lambda _, output: output.clipped > rules.clipped_share,
    }
    if transcribed:
        faults["new empty transcripts"] = lambda item, output: item.reference_words > 0 and output.hypothesis == ""
    guards = []
    for name, fault in faults.items():
        patched = [item for item in utterances if fault(item, item.patched)]
        new = {item.id: item.patched.failure or "" for item in patched if not fault(item, item.baseline)}
        detail = _offenders(new) or f"{len(patched)} in the patched arm, all in the untouched arm too"
        if not patched:
            detail = "none"
        guards.append(Guard(name=name, value=len(new), limit=0, outcome="fail" if new else "pass", detail=detail))
    return guards


def is_runaway(item: Utterance, output: ArmUtterance, rules: RowRules) -> bool:
    """Whether an output lasts longer than ``runaway_ratio`` times what its words, or the untouched arm, let expect."""
    by_words = rules.lead_s + rules.seconds_per_word * item.reference_words
    expected = min(by_words, item.baseline.audio_s) if item.baseline.audio_s > 0 else by_words
    return output.audio_s > rules.runaway_ratio * expected


def word_error_rate(baseline: float, patched: float, test: NonInferiority, rules: WerRules) -> list[Guard]:
    """The patched arm's corpus WER below the ceiling, and non-inferior. Values in percentage points."""
    sample = f"{test.differing} of {test.clusters} utterances differ, {test.method} limits"
    return [
        Guard(
            name="WER ceiling",
            value=100 * patched,
            limit=rules.ceiling_pp,
            outcome="pass" if 100 * patched < rules.ceiling_pp else "fail",
            detail=f"{100 * patched:.2f} %, untouched {100 * baseline:.2f} %",
        ),
        Guard(
            name="WER non-inferior",
            value=100 * test.high,
            limit=100 * test.margin,
            outcome=test.outcome,
            detail=f"Δ {100 * test.delta:+.2f} pp, limits {100 * test.low:+.2f} to {100 * test.high:+.2f} pp; {sample}",
        ),
    ]


def receipts(found: Sequence[Receipt], fusions: Sequence[str]) -> list[Guard]:
    """Every fusion of the run is applied and was called on one of its targets (a decoder replayed as a whole never
    calls its generator), and none fell back."""
    applied: dict[str, int] = {}
    for item in found:
        if item.status == "applied":
            applied[item.fusion] = applied.get(item.fusion, 0) + item.calls
    idle = {name: "not applied" for name in fusions if name not in applied}
    idle |= {name: "never called" for name, calls in applied.items() if calls == 0}
    fallbacks = {}
    for item in found:
        if item.fallbacks:
            fallbacks[f"{item.fusion} on {item.target}"] = ", ".join(f"{n}× {why}" for why, n in item.fallbacks.items())
    calls = sum(item.calls for item in found)
    return [
        Guard(
            name="fusions fired",
            value=len(idle),
            limit=0,
            outcome="fail" if idle or not fusions else "pass",
            detail=_offenders(idle) or f"{', '.join(fusions) or 'no fusion'}: {calls} calls",
        ),
        Guard(
            name="no fallback",
            value=len(fallbacks),
            limit=0,
            outcome="fail" if fallbacks else "pass",
            detail=_offenders(fallbacks) or "none",
        ),
    ]


def throughput(ratio: MedianRatio | None, noise: MedianRatio | None, pairs: int, rules: ThroughputRules) -> Guard:
    """Patched over untouched audio seconds per second: the interval excludes 1 by more than the A/A noise."""
    name = "throughput improves"
    if ratio is None or noise is None:
        return Guard(name=name, value=None, limit=1.0, outcome="not-judged", detail="no GPU")
    detail = f"×{ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] over {pairs} pairs, A/A ±{noise.half_width:.4f}"
    outcome: GateOutcome
    if ratio.high < 1:
        outcome = "fail"
    elif pairs < rules.claim_pairs:
        outcome, detail = "inconclusive", f"{detail}; a claim needs {rules.claim_pairs} pairs"
    elif noise.half_width > rules.noise_cap:
        outcome, detail = "inconclusive", f"{detail}: noise above its cap of {rules.noise_cap:g}"
    else:
        outcome = "pass" if ratio.low > 1 and ratio.median - 1 > noise.half_width else "inconclusive"
    return Guard(name=name, value=ratio.low, limit=1.0, outcome=outcome, detail=detail)


def no_regression(name: str, ratio: float | None, noise: float | None, rules: ThroughputRules, absent: str) -> Guard:
    """A figure where less is better: patched / untouched − 1 within max(tolerance, 2 × A/A noise)."""
    if ratio is None or noise is None:
        return Guard(name=name, value=None, limit=rules.tolerance, outcome="not-judged", detail=absent)
    limit = max(rules.tolerance, 2 * noise)
    detail = f"{100 * (ratio - 1):+.1f} %, A/A noise {100 * noise:.1f} %"
    if noise > rules.noise_cap:
        return Guard(name=name, value=ratio - 1, limit=limit, outcome="inconclusive", detail=f"{detail}: too noisy")
    outcome: GateOutcome = "pass" if ratio - 1 <= limit else "fail"
    return Guard(name=name, value=ratio - 1, limit=limit, outcome=outcome, detail=detail)


def peak_memory(baseline: int | None, patched: int | None, rules: ThroughputRules, absent: str) -> Guard:
    """Peak device memory within the tolerance, or above it by no more than the declared allowance."""
    name = "peak GPU memory"
    if not baseline or patched is None:  # no bytes at all: nothing was measured
        return Guard(name=name, value=None, limit=rules.tolerance, outcome="not-judged", detail=absent)
    limit = max(rules.tolerance, rules.memory_allowance_bytes / baseline)
    share = patched / baseline - 1
    detail = f"{100 * share:+.1f} %, {(patched - baseline) / 2**20:+.0f} MiB"
    return Guard(name=name, value=share, limit=limit, outcome="pass" if share <= limit else "fail", detail=detail)


def not_judged(protocol: Protocol, reason: str) -> list[Guard]:
    """The word error rate's guards where nothing was transcribed."""
    return [
        Guard(name="WER ceiling", value=None, limit=protocol.wer.ceiling_pp, outcome="not-judged", detail=reason),
        Guard(name="WER non-inferior", value=None, limit=protocol.wer.margin_pp, outcome="not-judged", detail=reason),
    ]


def _offenders(found: dict[str, str]) -> str:
    """The first few offenders with their reasons; empty where there are none."""
    shown = [f"{name}: {reason}" if reason else name for name, reason in list(found.items())[:NAMED]]
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    return "; ".join(shown + more)
