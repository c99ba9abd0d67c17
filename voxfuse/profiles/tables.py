"""A hotspot report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from voxfuse._terminal import plain
from voxfuse.records import Hotspot, HotspotReport, ProcessProfile
from voxfuse.records.profile import ceiling

SHOWN = 20
WIDEST_CHAIN = 70


def show(report: HotspotReport, console: Console, top: int = SHOWN) -> None:
    """Print every process: runtime tree, stages, hotspots, and what each fusion could give."""
    for process in report.processes:
        console.print(_tree(process))
        console.print(_stages(process))
        console.print(_hotspots(process, top))
        console.print(_fusions(process))
        for note in process.notes:
            console.print(f"note: {plain(note)}")
    if report.overhead:
        console.print(overhead_text(report))


def overhead_text(report: HotspotReport) -> str:
    """What profiling cost: the same work with and without it."""
    figures = report.overhead
    if "plain_calls_per_s" in figures:
        return (
            f"profile overhead: {figures['profiled_calls_per_s']:,.0f} module calls a second with the profiler and "
            f"{figures['plain_calls_per_s']:,.0f} without, {figures['ratio']:.2f} times as long"
        )
    return (
        f"profile overhead: the same work took {figures['profiled_s']:.3f} s with the profiler and "
        f"{figures['plain_s']:.3f} s without, {figures['ratio']:.2f} times as long; shares are of the profiled run"
    )


def tree_rows(process: ProcessProfile) -> list[tuple[str, float, float]]:
    """The runtime tree: branch, ms and share of the window, empty branches left out."""
    rows = [(name, value / 1e3, value / process.wall_us) for name, value in process.tree.items() if value > 0]
    return sorted(rows, key=lambda row: -row[1])


def fusion_rows(hotspots: Iterable[Hotspot]) -> list[tuple[str, int, float, float]]:
    """Per fusion: hotspots that it matches, their share of the critical path, and the ceiling of removing them all."""
    shares: dict[str, list[float]] = {}
    for hotspot in hotspots:
        for name in hotspot.fusions:
            shares.setdefault(name, []).append(hotspot.critical_path_share)
    rows = [(name, len(found), sum(found), ceiling(sum(found))) for name, found in shares.items()]
    return sorted(rows, key=lambda row: -row[2])


def next_kernel(process: ProcessProfile) -> Hotspot | None:
    """The most promising hotspot that no fusion matches, nobody else has a kernel for, and a kernel would help."""
    unmatched = (item for item in process.hotspots if (item.reason or "").startswith("unmatched"))
    return next((item for item in unmatched if item.advice is None), None)


def outcome(hotspot: Hotspot) -> str:
    """A hotspot's fusions, with what they run already, or the reason why there is none."""
    return " · ".join([*hotspot.fusions, *([hotspot.reason] if hotspot.reason else [])])


def _tree(process: ProcessProfile) -> Table:
    table = Table("T_total", "ms", "share", title=f"{process.trace}: {process.wall_us / 1e3:.1f} ms ({process.device})")
    for name, ms, share in tree_rows(process):
        table.add_row(plain(name), f"{ms:.2f}", f"{share:.1%}")
        if name == "bubbles":
            for cause, us in sorted(process.bubbles.items(), key=lambda item: -item[1]):
                table.add_row(f"  {plain(cause)}", f"{us / 1e3:.2f}", f"{us / process.wall_us:.1%}", style="dim")
    return table


def _stages(process: ProcessProfile) -> Table:
    table = Table("stage", "component", "GPU ms", "copy ms", "GPU idle ms", "launches", "critical path", "ceiling")
    for stage in process.stages:
        idle = sum(stage.idle_us.values())
        table.add_row(
            plain(stage.name or "(none)"),
            stage.component,
            f"{stage.gpu_us / 1e3:.2f}",
            f"{stage.copy_us / 1e3:.2f}",
            f"{idle / 1e3:.2f}",
            str(stage.launches),
            f"{stage.critical_path_share:.1%}",
            f"{stage.amdahl_ceiling:.2f}×",
        )
    return table


def _hotspots(process: ProcessProfile, top: int) -> Table:
    table = Table("path", "host", "ceiling", "kernel ceiling", "calls", "GPU ms", "where", "operations", "outcome")
    for item in process.hotspots[:top]:
        chain = item.operation if len(item.operation) <= WIDEST_CHAIN else f"{item.operation[: WIDEST_CHAIN - 1]}…"
        result = outcome(item) if item.fusions or not (item.reason or "").startswith("unmatched") else "unmatched"
        table.add_row(
            f"{item.critical_path_share:.1%}",
            f"{item.host_critical_share:.1%}",
            f"{item.amdahl_ceiling:.2f}×",
            f"{item.kernel_ceiling:.2f}×",
            str(item.calls),
            f"{item.gpu_us / 1e3:.2f}",
            plain(f"{item.stage}: {item.module} ({item.module_class})" if item.module else item.stage),
            plain(chain),
            plain(result),
        )
    return table


def _fusions(process: ProcessProfile) -> Table:
    table = Table(
        "fusion", "hotspots", "critical path", "ceiling", title="What each fusion could give, if it took no time"
    )
    for name, count, share, gain in fusion_rows(process.hotspots):
        table.add_row(plain(name), str(count), f"{share:.1%}", f"{gain:.2f}×")
    return table
