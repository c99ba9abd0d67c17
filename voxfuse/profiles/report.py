"""``hotspots.json`` and ``report.html`` of a profile: one page that needs nothing beside it."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from voxfuse.profiles.tables import fusion_rows, next_kernel, outcome, overhead_text, tree_rows
from voxfuse.records import HotspotReport, ProcessProfile, to_json

LISTED = 60
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: 2px 8px; border-bottom: 1px solid #ddd; }
th { text-align: left; background: #f4f4f4; } td.n { text-align: right; white-space: nowrap; }
td.chain { font-family: monospace; font-size: 12px; max-width: 420px; } img { max-width: 100%; }
"""


class ReportUnavailable(RuntimeError):
    """The page cannot be drawn; the message says what to install."""


def require_plots() -> None:
    """Raise ReportUnavailable, with what to install, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReportUnavailable("report.html needs matplotlib: pip install 'voxfuse[profile]', or --no-page")


def write_report(report: HotspotReport, folder: Path, with_page: bool = True) -> list[Path]:
    """Write the record and the page into a folder and return their paths; those of an earlier profile are replaced.

    Raises ReportUnavailable where matplotlib is missing and a page is wanted, before anything is written.
    """
    if with_page:
        require_plots()
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "hotspots.json", folder / "report.html"
    data.write_bytes(to_json(report))
    page.unlink(missing_ok=True)
    if not with_page:
        return [data]
    page.write_text(html(report), encoding="utf-8")
    return [data, page]


def html(report: HotspotReport) -> str:
    """The page. Names from traces are data: all text is escaped."""
    title = f"voxfuse profile{f' of {report.stack}' if report.stack else ''}"
    parts = [f"<h1>{escape(title)}</h1>", *_circumstances(report)]
    for process in report.processes:
        parts += _process(process, report)
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _circumstances(report: HotspotReport) -> list[str]:
    rows: list[tuple[str, object]] = [*report.workload.items()]
    if report.environment is not None:
        found = report.environment
        rows += [("GPU", found.gpu or "none"), ("driver", found.driver or "-"), ("torch", found.torch)]
        rows += [("Triton", found.triton or "none"), ("Python", found.python), ("commit", found.commit or "-")]
    rows += [(f"NVML {name}", f"{value:,.1f} (mean)") for name, value in report.samples.items()]
    rows += [(f"clocks lowered: {name}", f"{share:.0%} of samples") for name, share in report.throttled.items()]
    parts = [_table(("what", "value"), [(name, str(value)) for name, value in rows])] if rows else []
    if report.overhead:
        parts.append(f"<p>{escape(overhead_text(report))}.</p>")
    return parts


def _process(process: ProcessProfile, report: HotspotReport) -> list[str]:
    from voxfuse.profiles import plots

    tree = [(name, f"{ms:.2f}", f"{share:.1%}") for name, ms, share in tree_rows(process)]
    stages = [
        (
            stage.name or "(none)",
            stage.component,
            f"{stage.gpu_us / 1e3:.2f}",
            f"{stage.copy_us / 1e3:.2f}",
            ", ".join(f"{cause} {us / 1e3:.1f}" for cause, us in stage.idle_us.items() if us >= 50) or "0",
            str(stage.launches),
            f"{stage.critical_path_share:.1%}",
            f"{stage.amdahl_ceiling:.2f}×",
        )
        for stage in process.stages
    ]
    wanted = next_kernel(process)
    parts = [
        f"<h2>{escape(process.trace)}</h2>",
        *[f"<p>{escape(note)}.</p>" for note in process.notes],
        "<h3>Runtime tree</h3>",
        _image(plots.tree(process), "runtime tree"),
        _table(("T_total", "ms", "share"), tree),
        _table(("critical path", "ms"), [(name, f"{us / 1e3:.2f}") for name, us in process.path.items() if us > 0]),
        "<h3>Stages</h3>",
        _table(("stage", "component", "GPU ms", "copy ms", "idle ms", "launches", "critical path", "ceiling"), stages),
        _table(
            ("device", "busy ms (union)", "sum ms", "kernels", "streams"),
            [
                (
                    item.device,
                    f"{item.busy_us / 1e3:.2f}",
                    f"{item.sum_us / 1e3:.2f}",
                    str(item.kernels),
                    str(item.streams),
                )
                for item in process.devices
            ],
        ),
        "<h3>Timeline</h3>",
        _image(plots.timeline(process, report), "timeline"),
        "<h3>Hotspots</h3>",
        _image(plots.top_hotspots(process), "hotspots"),
        _table(
            ("fusion", "hotspots", "critical path", "ceiling if it took no time"),
            [
                (name, str(count), f"{share:.1%}", f"{gain:.2f}×")
                for name, count, share, gain in fusion_rows(process.hotspots)
            ],
        ),
        *(
            [f"<p>Next kernel to write: <code>{escape(wanted.operation)}</code> in {escape(wanted.module)}.</p>"]
            if wanted
            else []
        ),
        _hotspots(process),
    ]
    if process.launches:
        parts += ["<h3>Launches</h3>", _image(plots.launches(process), "launches")]
    return parts


def _hotspots(process: ProcessProfile) -> str:
    head = ("path", "of it host", "ceiling", "kernel ceiling", "in its stage", "calls", "launches", "GPU ms", "host ms")
    rows = []
    for item in process.hotspots[:LISTED]:
        shape = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in item.signature[:2])
        figures = (
            f"{item.critical_path_share:.2%}",
            f"{item.host_critical_share:.2%}",
            f"{item.amdahl_ceiling:.3f}×",
            f"{item.kernel_ceiling:.3f}×",
            f"{item.stage_ceiling:.2f}×",
            str(item.calls),
            str(item.launches),
            f"{item.gpu_us / 1e3:.2f}",
            f"{item.host_us / 1e3:.2f}",
        )
        where = f"{item.stage}: {item.module} ({item.module_class})" if item.module else item.stage
        rows.append((*figures, where, item.operation, shape, " — ".join(filter(None, (outcome(item), item.advice)))))
    return _table((*head, "where", "operations", "shape", "outcome"), rows, chain=(10, 11))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], chain: tuple[int, ...] = ()) -> str:
    """A table; cells that begin with a digit are aligned right, those of the columns ``chain`` set as code."""
    lines = ["<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            kind = "chain" if column in chain else "n" if cell[:1].isdigit() else ""
            cells.append(f'<td class="{kind}">{escape(cell)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def _image(png: bytes, alternative: str) -> str:
    return f'<img alt="{escape(alternative)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
