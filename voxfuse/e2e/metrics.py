"""The gate's figures, each for both arms with their difference, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from voxfuse.e2e.statistics import MedianRatio, median_ratio
from voxfuse.records import Block, Metric, Utterance

PERCENTILES = (50, 95, 99)
NO_GPU = "no GPU"
NO_STREAM = "the stack does not stream"
ONE_AT_A_TIME = "one request at a time"


class Timing(NamedTuple):
    """Wall and audio seconds of one arm's outputs, in order."""

    wall_s: np.ndarray
    audio_s: np.ndarray

    def figures(self) -> dict[str, float]:
        """Throughput, real-time factor and latency; more is better in the first two, less in the rest."""
        wall, audio = self.wall_s.sum(), self.audio_s.sum()
        found = {"throughput, requests": len(self.wall_s) / wall, "throughput, audio": audio / wall}
        spoken = self.audio_s > 0
        for percent in PERCENTILES:
            found[f"RTF p{percent}"] = float(np.percentile(self.wall_s[spoken] / self.audio_s[spoken], percent))
        for percent in PERCENTILES:
            found[f"latency p{percent}"] = float(np.percentile(self.wall_s, percent))
        return {name: float(value) for name, value in found.items()}


UNITS = {"throughput, requests": "1/s", "throughput, audio": "s/s", "RTF": "s/s", "latency": "s"}
LESS_IS_BETTER = tuple(f"{name} p{percent}" for name in ("RTF", "latency") for percent in PERCENTILES)


def of_kind(blocks: Iterable[Block], kind: str) -> list[Block]:
    """The timed pairs of one kind."""
    return [block for block in blocks if block.kind == kind]


def block_timings(blocks: Sequence[Block]) -> tuple[Timing, Timing]:
    """All outputs of the blocks, untouched arm and patched arm."""
    return (
        Timing(_flat(block.baseline_wall_s for block in blocks), _flat(block.baseline_audio_s for block in blocks)),
        Timing(_flat(block.patched_wall_s for block in blocks), _flat(block.patched_audio_s for block in blocks)),
    )


def spoken_timings(utterances: Sequence[Utterance]) -> tuple[Timing, Timing] | None:
    """The outputs of the paired generation that succeeded in both arms, or None where there are none."""
    sound = [item for item in utterances if item.baseline.audio_sha256 and item.patched.audio_sha256]
    if not sound:
        return None
    arms = [[item.baseline for item in sound], [item.patched for item in sound]]
    baseline, patched = (
        Timing(_flat(row.wall_s for row in rows), np.array([row.audio_s for row in rows for _ in row.wall_s]))
        for rows in arms
    )
    return baseline, patched


def throughput_ratio(blocks: Sequence[Block]) -> MedianRatio | None:
    """Median of patched over untouched audio seconds per second, paired by block, with its 95 % interval."""
    if not blocks:
        return None
    return median_ratio(
        [sum(block.patched_audio_s) / sum(block.patched_wall_s) for block in blocks],
        [sum(block.baseline_audio_s) / sum(block.baseline_wall_s) for block in blocks],
    )


def timing_metrics(utterances: Sequence[Utterance], blocks: Sequence[Block]) -> list[Metric]:
    """Throughput, RTF, latency and their like: from timed blocks, else from speaking and then not judged."""
    paired = of_kind(blocks, "a/b")
    timings = block_timings(paired) if paired else spoken_timings(utterances)
    metrics = []
    if timings is not None:
        baseline, patched = (timing.figures() for timing in timings)
        reason = None if paired else NO_GPU
        for name, value in baseline.items():
            unit = UNITS[name] if name in UNITS else UNITS[name.split()[0]]
            metrics.append(paired_metric(name, unit, value, patched[name], not_judged=reason))
    for kind in sorted({block.kind for block in blocks}):
        ratio = throughput_ratio(of_kind(blocks, kind))
        if ratio is not None:
            metrics.append(
                Metric(
                    name=f"throughput ratio {kind}",
                    unit="×",
                    baseline=1.0,
                    patched=ratio.median,
                    delta=ratio.median - 1,
                    low=ratio.low - 1,
                    high=ratio.high - 1,
                )
            )
    metrics += device_metrics(paired)
    metrics += [
        Metric(name=name, unit="s", baseline=None, patched=None, not_judged=reason)
        for name, reason in (
            ("time to first audio", NO_STREAM),
            ("inter-chunk p95", NO_STREAM),
            ("queue time", ONE_AT_A_TIME),
        )
    ]
    return metrics


def device_metrics(blocks: Sequence[Block]) -> list[Metric]:
    """NVML means over the timed blocks; none where nothing was sampled."""
    names = sorted({name for block in blocks for name in (*block.baseline_device, *block.patched_device)})
    metrics = []
    for name in names:
        values = [
            [arm[name] for arm in arms if name in arm]
            for arms in ([b.baseline_device for b in blocks], [b.patched_device for b in blocks])
        ]
        if all(values):
            label, _, unit = name.rpartition("_")
            metrics.append(paired_metric(f"GPU {label.replace('_', ' ')}", unit, *(float(np.mean(v)) for v in values)))
    return metrics


def stage_metrics(utterances: Sequence[Utterance], not_judged: str | None) -> list[Metric]:
    """Median seconds per stage over the outputs that report it, timers synchronised, and what no stage accounts for.

    The median, because an output may compile a kernel for a new shape.
    """
    stages = list(dict.fromkeys(name for item in utterances for name in item.baseline.stages_s))
    sound = [item for item in utterances if item.baseline.stages_s and item.patched.stages_s]
    metrics = []
    for name in stages if sound else []:
        baseline = float(np.median([item.baseline.stages_s.get(name, 0.0) for item in sound]))
        patched = float(np.median([item.patched.stages_s.get(name, 0.0) for item in sound]))
        metrics.append(paired_metric(f"stage {name}", "s", baseline, patched, not_judged=not_judged))
    if sound:
        overhead = [
            float(np.median([sum(arm(item).wall_s) - sum(arm(item).stages_s.values()) for item in sound]))
            for arm in (lambda item: item.baseline, lambda item: item.patched)
        ]
        metrics.append(paired_metric("copy and framework overhead", "s", *overhead, not_judged=not_judged))
    return metrics


def fidelity_metrics(utterances: Sequence[Utterance]) -> list[Metric]:
    """SNR and log-spectrum L1 of the patched arm against the untouched one, over outputs that are not identical."""
    compared = [item for item in utterances if item.baseline.audio_sha256 and item.patched.audio_sha256]
    identical = sum(item.baseline.audio_sha256 == item.patched.audio_sha256 for item in compared)
    metrics = [Metric(name="bit-identical outputs", unit="", baseline=len(compared), patched=identical)]
    ratios = [item.snr_db for item in utterances if item.snr_db is not None]
    distances = [item.log_spectrum_l1 for item in utterances if item.log_spectrum_l1 is not None]
    same = None if ratios else "no outputs that differ and can be compared"
    figures: tuple[tuple[str, str, list[float], Callable[[list[float]], float]], ...] = (
        ("SNR, median", "dB", ratios, lambda values: float(np.median(values))),
        ("SNR, worst", "dB", ratios, min),
        ("log-spectrum L1, median", "", distances, lambda values: float(np.median(values))),
        ("log-spectrum L1, worst", "", distances, max),
    )
    for name, unit, values, statistic in figures:
        value = statistic(values) if values else None
        metrics.append(Metric(name=name, unit=unit, baseline=None, patched=value, not_judged=same))
    return metrics


def paired_metric(
    name: str, unit: str, baseline: float | None, patched: float | None, *, not_judged: str | None = None
) -> Metric:
    """One figure of both arms; the difference is patched − baseline."""
    delta = None if baseline is None or patched is None else patched - baseline
    return Metric(name=name, unit=unit, baseline=baseline, patched=patched, delta=delta, not_judged=not_judged)


def _flat(values: Iterable[Iterable[float]]) -> np.ndarray:
    return np.array([value for group in values for value in group], dtype=np.float64)
