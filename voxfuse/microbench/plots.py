"""Verdicts as a picture: speed-up bars with their intervals, and how near the calls come to the machine's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from voxfuse.microbench.bench import medians_us
from voxfuse.recompute import VOXFUSE
from voxfuse.records import MicroVerdict

INSTALL = "plots need matplotlib: pip install 'voxfuse[bench]'"
COLOURS = {"win": "#2a7f4f", "neutral": "#8a8a8a", "loss": "#b03a2e"}
INCHES_PER_CASE, INCHES_WIDE = 0.42, 12.0


def draw(verdicts: Sequence[MicroVerdict], path: Path) -> None:
    """Write a PNG of the verdicts that have a speed; a wrong one is named without a bar.

    Raises ImportError, saying what to install, without matplotlib, and ValueError where there is no verdict.
    """
    if not verdicts:
        raise ValueError("no verdict to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(INSTALL) from error
    rows = len([None for verdict in verdicts for _ in (verdict.ratios or (None,))])
    figure = Figure(figsize=(INCHES_WIDE, 2.5 + INCHES_PER_CASE * rows + 5.0), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: neither a display nor global state
    upper, lower = figure.subplots(2, 1, height_ratios=(INCHES_PER_CASE * rows + 1.0, 5.0))
    _bars(upper, verdicts)
    _roofline(lower, verdicts)
    environment = verdicts[0].environment
    where = f"{environment.gpu or 'CPU, nothing is claimed'}, torch {environment.torch}, Triton {environment.triton}"
    figure.suptitle(where, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)


def _bars(axes, verdicts: Sequence[MicroVerdict]) -> None:  # type: ignore[no-untyped-def]
    """One bar per case and baseline: the median of paired ratios with its 95 % interval; 1 is as fast as."""
    labels: list[str] = []
    for verdict in verdicts:
        title = f"{verdict.fusion}: {verdict.case.name}"
        if not verdict.ratios:
            labels.append(f"{title} (wrong, no speed)")
            continue
        for ratio in verdict.ratios:
            row = len(labels)
            labels.append(f"{title} / {ratio.baseline}")
            axes.barh(row, ratio.median, color=COLOURS[ratio.verdict], height=0.7)
            whiskers = [[max(0.0, ratio.median - ratio.low)], [max(0.0, ratio.high - ratio.median)]]
            axes.errorbar(ratio.median, row, xerr=whiskers, color="black", capsize=3, linewidth=1)
            axes.annotate(f" {ratio.median:.2f}×", (max(ratio.high, ratio.median), row), va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel("time of the baseline / time of voxfuse (median of pairs, 95 % interval)")


def _roofline(axes, verdicts: Sequence[MicroVerdict]) -> None:  # type: ignore[no-untyped-def]
    """Bytes per second over bytes moved, below the copy bandwidth and one launch; calls bound by arithmetic by the
    bytes per second that the matmul peak would allow them."""
    timed = [verdict for verdict in verdicts if verdict.ratios]
    for name, marker in ((VOXFUSE, "o"), ("eager", "x"), ("compile", "+")):
        points = [(verdict.bytes_moved, medians_us(verdict)[name]) for verdict in timed if name in medians_us(verdict)]
        if points:
            axes.plot([x for x, _ in points], [x / us * 1e6 for x, us in points], marker, label=name)
    if timed:
        ceilings = timed[0].ceilings
        first, last = min(v.bytes_moved for v in timed) / 2, max(v.bytes_moved for v in timed) * 2
        peak = ceilings.get("peak_copy_bytes_per_s", ceilings["copy_bytes_per_s"])
        knee = peak * ceilings["launch_floor_us"] / 1e6  # bytes that a copy moves in one launch's time
        ends = sorted({first, last, min(max(knee, first), last)})
        axes.plot(ends, [peak] * len(ends), "k-", linewidth=1, label=f"copy {peak / 1e12:.2f} TB/s")
        floor = ceilings["launch_floor_us"]
        axes.plot(
            ends, [min(x / floor * 1e6, peak) for x in ends], "k:", linewidth=1, label=f"one launch {floor:.1f} µs"
        )
    bounded = [verdict for verdict in timed if verdict.flop]
    if bounded:
        allowed = [v.bytes_moved / (v.flop / v.ceilings["flop_per_s"]) for v in bounded]
        axes.plot([v.bytes_moved for v in bounded], allowed, "k_", label="arithmetic allows")
    axes.set(xscale="log", yscale="log", xlabel="bytes moved by a call", ylabel="bytes per second")
    if timed:
        axes.legend(fontsize=8)
