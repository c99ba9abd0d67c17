"""What follows from a micro verdict's samples: ratios with intervals, noise, controls, and whether a record is honest.

A ratio is the median over pairs of baseline / voxfuse with a percentile bootstrap interval over pairs. Win: the lower
end lies above 1 + bar; loss: the upper end lies below 1 / (1 + bar), so that swapping the arms swaps the verdict.
The bar is max(3 %, twice the A/A half-width). Where a control fails, no comparison is called a win or a loss.

``inconsistency`` checks what a record claims against the samples that it carries, in microseconds and without
resampling: medians exactly, ends of intervals by the ranks between which the bootstrap of a median puts them, and
everything that follows from those. ``recompute`` computes all of it anew.
"""

from __future__ import annotations

import functools
import math

import msgspec
import numpy as np

from voxfuse.records import Comparison, MicroVerdict, Ratio

RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_240_601
MIN_BAR = 0.03
MAX_PAIRS = 5_000  # a record is data from outside: resampling more would take all memory
TOLERANCE = 1e-9  # relative: JSON keeps every bit, another numpy may sum in another order

EAGER, VOXFUSE = "eager", "voxfuse"
AA_FIRST, AA_SECOND, NULL, SLEEP = "aa_first", "aa_second", "null", "sleep"
CONTROLS = (AA_FIRST, AA_SECOND, NULL, SLEEP)


def recompute(verdict: MicroVerdict) -> MicroVerdict:
    """The same verdict with everything derived computed anew from its samples; equal to it where it is honest."""
    us = _samples(verdict)
    if verdict.wrong is not None or VOXFUSE not in us:
        silent = tuple(msgspec.structs.replace(arm, gpu_us=(), host_us=None) for arm in verdict.arms)
        silent = tuple(arm for arm in silent if arm.name not in CONTROLS)
        return msgspec.structs.replace(
            verdict, arms=silent, ratios=(), aa_half_width=0.0, win_bar=MIN_BAR, controls={}, speed_of_light=None
        )
    _, aa_low, aa_high = ratio_interval(us[AA_FIRST], us[AA_SECOND])
    half_width = max(aa_high - 1, 1 - aa_low)  # of the smallest interval around 1 that holds the A/A interval
    bar = max(MIN_BAR, 2 * half_width)
    null, sleep = ratio_interval(us[EAGER], us[NULL]), ratio_interval(us[VOXFUSE], us[SLEEP])
    sound = is_sound(null[1], null[2], sleep[2], bar)
    ratios = []
    for name in us:
        if name != VOXFUSE and name not in CONTROLS:
            median, low, high = ratio_interval(us[name], us[VOXFUSE])
            outcome = compare(low, high, bar) if sound else "neutral"
            ratios.append(Ratio(baseline=name, median=median, low=low, high=high, verdict=outcome))
    controls = {
        "null_ratio": null[0],
        "null_low": null[1],
        "null_high": null[2],
        "sleep_added_us": verdict.controls["sleep_added_us"],
        "sleep_found_us": float(np.median(us[SLEEP] - us[VOXFUSE])),
        "sleep_high": sleep[2],
        "sound": float(sound),
    }
    return msgspec.structs.replace(
        verdict,
        ratios=tuple(ratios),
        aa_half_width=half_width,
        win_bar=bar,
        controls=controls,
        speed_of_light=light_us(verdict) / float(np.median(us[VOXFUSE])),
    )


def light_us(verdict: MicroVerdict) -> float:
    """Microseconds that the call takes at the ceilings measured beside it: bytes, arithmetic or one launch, whichever
    takes longest."""
    floors = [verdict.bytes_moved / verdict.ceilings["copy_bytes_per_s"] * 1e6, verdict.ceilings["launch_floor_us"]]
    if verdict.flop:
        floors.append(verdict.flop / verdict.ceilings["flop_per_s"] * 1e6)
    return max(floors)


def ratio_interval(baseline: np.ndarray, contender: np.ndarray) -> tuple[float, float, float]:
    """Median of the paired ratios baseline / contender, and its 95 % percentile bootstrap interval over pairs."""
    ratios = baseline / contender
    low, high = np.percentile(np.median(ratios[_picks(len(ratios))], axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


@functools.lru_cache(maxsize=4)
def _picks(pairs: int) -> np.ndarray:
    return np.random.default_rng(BOOTSTRAP_SEED).integers(0, pairs, (RESAMPLES, pairs))


def compare(low: float, high: float, bar: float) -> Comparison:
    """``win`` above 1 + bar, ``loss`` below 1 / (1 + bar), ``neutral`` where the interval reaches into between."""
    if low > 1 + bar:
        return "win"
    return "loss" if high < 1 / (1 + bar) else "neutral"


def is_sound(null_low: float, null_high: float, sleep_high: float, bar: float) -> bool:
    """Whether both controls were judged as they must be: identical code neutral, the known delay a loss."""
    return compare(null_low, null_high, bar) == "neutral" and compare(0.0, sleep_high, bar) == "loss"


def inconsistency(verdict: MicroVerdict) -> str | None:
    """What a record claims that its samples do not carry, or None where everything follows from them."""
    us = _samples(verdict)
    if verdict.wrong is not None:
        return "it is wrong and yet claims a speed" if us or verdict.ratios else None
    return _sample_fault(verdict, us) or _interval_fault(verdict, us) or _verdict_fault(verdict, us)


def _samples(verdict: MicroVerdict) -> dict[str, np.ndarray]:
    return {arm.name: np.asarray(arm.gpu_us) for arm in verdict.arms if arm.gpu_us}


def _sample_fault(verdict: MicroVerdict, us: dict[str, np.ndarray]) -> str | None:
    needed = (VOXFUSE, EAGER, *CONTROLS, *(ratio.baseline for ratio in verdict.ratios))
    if missing := [name for name in dict.fromkeys(needed) if name not in us]:
        return f"no samples of {', '.join(missing)}"
    if len({arm.name for arm in verdict.arms}) != len(verdict.arms):
        return "an arm is listed twice"
    if len({len(samples) for samples in us.values()}) != 1:
        return "its arms have different numbers of samples, so they are not pairs"
    if (pairs := len(us[VOXFUSE])) > MAX_PAIRS:
        return f"{pairs} pairs; at most {MAX_PAIRS} are read"
    if not all(np.isfinite(samples).all() and (samples > 0).all() for samples in us.values()):
        return "a sample is not a positive time"
    compared = [ratio.baseline for ratio in verdict.ratios]
    if sorted(compared) != sorted(name for name in us if name != VOXFUSE and name not in CONTROLS):
        return f"it has samples of other arms than it compares ({', '.join(compared)})"
    return None


def _interval_fault(verdict: MicroVerdict, us: dict[str, np.ndarray]) -> str | None:
    """Whether every interval claimed lies where its samples put it, and every median is theirs."""
    low, high = _end_ranges(us[AA_FIRST], us[AA_SECOND])
    claims = [("A/A half-width", verdict.aa_half_width, max(1 - low[1], high[0] - 1), max(1 - low[0], high[1] - 1))]
    intervals = {
        "control null,": (us[EAGER], us[NULL], verdict.controls.get("null_low"), verdict.controls.get("null_high")),
        "control sleep,": (us[VOXFUSE], us[SLEEP], None, verdict.controls.get("sleep_high")),
    }
    for ratio in verdict.ratios:
        pairs = us[ratio.baseline], us[VOXFUSE]
        median = float(np.median(pairs[0] / pairs[1]))
        claims.append((f"ratio to {ratio.baseline}", ratio.median, median, median))
        intervals[f"ratio to {ratio.baseline},"] = (*pairs, ratio.low, ratio.high)
    for what, (baseline, contender, claimed_low, claimed_high) in intervals.items():
        low, high = _end_ranges(baseline, contender)
        claims += [(f"{what} lower end", claimed_low, *low)] if claimed_low is not None else []
        claims += [(f"{what} upper end", claimed_high, *high)] if claimed_high is not None else []
    for what, claimed, first, last in claims:
        if not first - TOLERANCE * abs(first) <= claimed <= last + TOLERANCE * abs(last):
            found = f"{first:.5g}" if first == last else f"between {first:.5g} and {last:.5g}"
            return f"{what}: {claimed:.5g} claimed, {found} from its samples"
    return None


def _end_ranges(baseline: np.ndarray, contender: np.ndarray) -> tuple[tuple[float, float], tuple[float, float]]:
    """Between which values the bootstrap of the median ratio can have put the lower and the upper end.

    Its 2.5 % and 97.5 % points are near the ranks n/2 ∓ 0.98·√n (the binomial's); half as many ranks and one more are
    granted to either side.
    """
    ordered = np.sort(baseline / contender)
    count = len(ordered)
    spread = 0.98 * math.sqrt(count)
    slack = 0.5 * spread + 1.5

    def values(rank: float) -> tuple[float, float]:
        first, last = math.floor(rank - slack) - 1, math.ceil(rank + slack)
        return float(ordered[max(0, first)]), float(ordered[min(count - 1, last)])

    return values(count / 2 - spread), values(count / 2 + spread)


def _verdict_fault(verdict: MicroVerdict, us: dict[str, np.ndarray]) -> str | None:
    """Whether the bar, the controls' verdict, every comparison and the fraction of the speed of light follow."""
    bar = max(MIN_BAR, 2 * verdict.aa_half_width)
    if not math.isclose(verdict.win_bar, bar, rel_tol=TOLERANCE):
        return f"win bar {verdict.win_bar:.4g} claimed, {bar:.4g} from its A/A half-width"
    try:
        names = ("null_low", "null_high", "sleep_high", "sleep_added_us")  # the last one recompute needs
        null_low, null_high, sleep_high, _ = (verdict.controls[name] for name in names)
        light = light_us(verdict) / float(np.median(us[VOXFUSE]))
    except KeyError as error:
        return f"the control or ceiling {error.args[0]} is missing"
    except ZeroDivisionError:
        return "a ceiling is zero"
    if verdict.speed_of_light is None or not math.isclose(verdict.speed_of_light, light, rel_tol=TOLERANCE):
        return f"{verdict.speed_of_light} of the speed of light claimed, {light:.4g} from its ceilings and samples"
    sound = is_sound(null_low, null_high, sleep_high, bar)
    if verdict.controls.get("sound") != float(sound):
        return f"controls claimed {'un' if sound else ''}sound, but they are {'' if sound else 'un'}sound"
    for ratio in verdict.ratios:
        outcome = compare(ratio.low, ratio.high, bar) if sound else "neutral"
        if ratio.verdict != outcome:
            return f"{ratio.verdict} claimed against {ratio.baseline}, {outcome} from its interval and controls"
    return None
