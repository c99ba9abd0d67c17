"""The plots of a report, as PNG: drawn without a display."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from voxfuse.profiles.tables import tree_rows
from voxfuse.records import HotspotReport, ProcessProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 15
COLOURS = {
    "tokenizer": "#4477aa",
    "AR": "#66ccee",
    "DiT": "#228833",
    "vocoder": "#ccbb44",
    "other": "#888888",
    "copy": "#ee6677",
    "queue": "#dddddd",
    "bubbles": "#bbbbbb",
}


def tree(process: ProcessProfile) -> bytes:
    """T_total as one bar per branch, bubbles split by cause."""
    total = process.wall_us
    rows = []
    for name, ms, share in tree_rows(process):
        rows.append((name, ms, share, COLOURS.get(name, "#888888")))
        if name == "bubbles":
            causes = sorted(process.bubbles.items(), key=lambda item: -item[1])
            rows += [(f"of it {cause}", us / 1e3, us / total, "#dddddd") for cause, us in causes if us > 0]
    figure, axes = _figure(8, 0.4 * len(rows) + 1.2)
    rows.reverse()
    axes.barh([row[0] for row in rows], [row[1] for row in rows], color=[row[3] for row in rows])
    for index, (_, ms, share, _) in enumerate(rows):
        axes.text(ms, index, f" {ms:.1f} ms, {share:.1%}", va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * max(row[1] for row in rows))
    axes.set_xlabel("ms")
    axes.set_title(f"T_total = {total / 1e3:.1f} ms")
    return _png(figure)


def timeline(process: ProcessProfile, report: HotspotReport) -> bytes:
    """Busy share of the device over time by component; NVML's utilisation and power where they were sampled."""
    bins = max((len(values) for values in process.timeline.values()), default=1)
    seconds = [process.wall_us / 1e6 * (index + 0.5) / bins for index in range(bins)]
    figure, axes = _figure(10, 3.2)
    names = list(process.timeline)
    axes.stackplot(
        seconds,
        [process.timeline[name] for name in names],
        labels=names,
        colors=[COLOURS.get(name, "#888888") for name in names],
        step="mid",
    )
    axes.set_xlim(0, process.wall_us / 1e6)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("s")
    axes.set_ylabel("busy share")
    at = report.series.get("at_s", ())
    if "utilization_percent" in report.series:
        axes.plot(
            at, [value / 100 for value in report.series["utilization_percent"]], "k.-", lw=0.8, label="NVML util."
        )
    if "power_w" in report.series:
        power = axes.twinx()
        power.plot(at, report.series["power_w"], "r-", lw=0.8)
        power.set_ylabel("W", color="r")
    axes.legend(loc="upper right", fontsize=7)
    axes.set_title("device timeline" if process.device == "gpu" else "operations on the CPU over time")
    return _png(figure)


def top_hotspots(process: ProcessProfile) -> bytes:
    """The hotspots with the largest share of the critical path, kernels and host apart."""
    rows = list(reversed(process.hotspots[:TOP]))
    figure, axes = _figure(10, 0.42 * len(rows) + 1.2)
    labels = [f"{_short(item.module or item.stage, 34)}: {_short(item.operation, 44)}" for item in rows]
    places = range(len(rows))
    kernels = [100 * (item.critical_path_share - item.host_critical_share) for item in rows]
    axes.barh(places, kernels, color="#ccbb44", label="kernels" if process.device == "gpu" else "operations")
    host = [100 * item.host_critical_share for item in rows]
    axes.barh(places, host, left=kernels, color="#bbbbbb", label="host")
    for place, item in zip(places, rows, strict=True):
        text = ", ".join(item.fusions) or (item.reason or "").partition(":")[0]
        axes.text(100 * item.critical_path_share, place, f" {text}", va="center", fontsize=7)
    axes.set_yticks(list(places), labels, fontsize=7)
    axes.set_xlim(0, 1.35 * max((100 * item.critical_path_share for item in rows), default=1))
    axes.set_xlabel("% of the critical path")
    axes.legend(fontsize=7, loc="lower right")
    axes.set_title("hotspots")
    return _png(figure)


def launches(process: ProcessProfile) -> bytes:
    """Calls that put work on a device, by stage and by name."""
    figure, axes = _figure(8, 2.8)
    stages = [(stage.name or "(none)", stage.launches) for stage in process.stages if stage.launches]
    bars = stages + list(process.launches.items())
    colours = ["#4477aa"] * len(stages) + ["#888888"] * len(process.launches)
    axes.barh([name for name, _ in reversed(bars)], [count for _, count in reversed(bars)], color=colours[::-1])
    for index, (_, count) in enumerate(reversed(bars)):
        axes.text(count, index, f" {count}", va="center", fontsize=8)
    axes.set_title("launches by stage (blue) and by call (grey)")
    return _png(figure)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")  # long labels included
    return buffer.getvalue()
