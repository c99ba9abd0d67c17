"""``EVIDENCE.md``: the shipped verdicts as a page that people read, wins and losses alike. Generated, never edited."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from voxfuse.evidence.acceptance import accepted
from voxfuse.evidence.ledger import Entry
from voxfuse.records import Fusion, GateVerdict, MicroVerdict, Ratio

HEAD = """# Evidence

Generated from `voxfuse/evidence/records` by `voxfuse ledger render`; do not edit. Every line is a record that carries
its samples: `voxfuse ledger recompute` computes all verdicts again from them. Ratios are the baseline's time over
voxfuse's, as the median of pairs with its 95 % interval: below 1 voxfuse is slower. *Of light* is the fraction of what
copy bandwidth, arithmetic or one launch allow on that GPU. Times are the GPU's (graph replay); of
whole decode steps, `istft_polar` and `ras_sampling` they are the wall's, with a wait for the device in every sample.
"""
OWN_COLUMNS = ("eager", "compile")
METRICS = ("throughput ratio a/b", "latency p50", "peak GPU memory", "corpus WER", "SNR, median")


def render(entries: Sequence[Entry], fusions: Iterable[Fusion], base: Path) -> str:
    """The page. ``base`` is the folder that the records' paths are given from; fusions without a record are named."""
    parts = [HEAD]
    fusions = list(fusions)
    for gpu, capability in sorted({_place(entry) for entry in entries}):
        own = [entry for entry in entries if _place(entry) == (gpu, capability)]
        parts.append(f"## {gpu}, compute capability {capability}\n")
        parts.append(_defaults(own, fusions, capability))
        parts.append(_micros([entry for entry in own if isinstance(entry.verdict, MicroVerdict)], base))
        parts.append(_gates([entry for entry in own if isinstance(entry.verdict, GateVerdict)], base))
    judged: set[str] = set()
    for entry in entries:
        verdict = entry.verdict
        judged |= {verdict.fusion} if isinstance(verdict, MicroVerdict) else set(verdict.fusions)
    if unjudged := sorted(fusion.name for fusion in fusions if fusion.name not in judged):
        parts.append(f"## Not judged\n\nNo record of: {', '.join(unjudged)}. They are off unless asked for.\n")
    return "\n".join(part for part in parts if part)


def _place(entry: Entry) -> tuple[str, str]:
    environment = entry.verdict.environment
    return environment.gpu or "CPU", environment.compute_capability or "none"


def _defaults(entries: Sequence[Entry], fusions: Sequence[Fusion], capability: str) -> str:
    rows = []
    for stack, version in sorted({_stack(entry) for entry in entries if isinstance(entry.verdict, GateVerdict)}):
        for fusion in fusions:
            if stack in fusion.stacks:
                found = accepted(fusion, stack, version, capability, list(entries))
                state = "off" if not found.accepted else "on, fidelity only" if found.fidelity_only else "on"
                rows.append((fusion.name, f"{stack} {version}", fusion.contract, state))
    return _table("### What is on by default", ("fusion", "stack", "contract", "default"), rows)


def _stack(entry: Entry) -> tuple[str, str]:
    verdict = entry.verdict
    return (verdict.stack, verdict.stack_version) if isinstance(verdict, GateVerdict) else (verdict.case.stack, "")


def _micros(entries: Sequence[Entry], base: Path) -> str:
    rows: list[tuple[str, ...]] = []
    for entry in sorted(entries, key=_micro_order):
        verdict = entry.verdict
        assert isinstance(verdict, MicroVerdict)
        link = f"[{verdict.case.name}]({_relative(entry.path, base)})"
        if verdict.wrong is not None:
            rows.append((verdict.fusion, link, "", f"**wrong**: {verdict.wrong}", "", "", ""))
            continue
        ratios = {ratio.baseline: ratio for ratio in verdict.ratios}
        ours = statistics.median(next(arm.gpu_us for arm in verdict.arms if arm.name == "voxfuse"))
        peers = ", ".join(f"{name}: {_ratio(ratio)}" for name, ratio in ratios.items() if name not in OWN_COLUMNS)
        figures = (_ratio(ratios.get(name)) for name in OWN_COLUMNS)
        light = "" if verdict.speed_of_light is None else f"{verdict.speed_of_light:.2f}"
        rows.append((verdict.fusion, link, f"{ours:.1f}", *figures, peers or "none", light))
    counts = []
    for name in OWN_COLUMNS:
        wins, neutral, losses = (_count(entries, name, outcome) for outcome in ("win", "neutral", "loss"))
        counts.append(f"{wins} wins, {neutral} neutral, {losses} losses against {name}")
    wrong = sum(entry.verdict.wrong is not None for entry in entries if isinstance(entry.verdict, MicroVerdict))
    heading = f"### Shape by shape\n\n{'; '.join(counts)}; {wrong} wrong."
    return _table(heading, ("fusion", "case", "voxfuse µs", *OWN_COLUMNS, "peers", "of light"), rows)


def _micro_order(entry: Entry) -> tuple[str, str, str]:
    verdict = entry.verdict
    assert isinstance(verdict, MicroVerdict)
    return verdict.fusion, verdict.case.name, entry.path.name


def _count(entries: Sequence[Entry], baseline: str, outcome: str) -> int:
    return sum(
        ratio.baseline == baseline and ratio.verdict == outcome
        for entry in entries
        if isinstance(entry.verdict, MicroVerdict)
        for ratio in entry.verdict.ratios
    )


def _gates(entries: Sequence[Entry], base: Path) -> str:
    rows = []
    for entry in entries:
        verdict = entry.verdict
        assert isinstance(verdict, GateVerdict)
        metrics = {metric.name: metric for metric in verdict.metrics}
        figures = []
        for name in METRICS:
            metric = metrics.get(name)
            if metric is None or metric.patched is None:
                figures.append("not judged")
            elif metric.baseline is None:
                figures.append(f"{metric.patched:.4g} {metric.unit}".strip())
            else:
                figures.append(f"{metric.baseline:.4g} → {metric.patched:.4g} {metric.unit}".strip())
        link = f"[{verdict.stack} {verdict.stack_version}, {verdict.protocol}]({_relative(entry.path, base)})"
        said = f"**{verdict.verdict}**" + (f": {'; '.join(verdict.reasons)}" if verdict.reasons else "")
        rows.append((link, ", ".join(verdict.fusions), said, str(len(verdict.utterances)), *figures))
    return _table("### End to end", ("stack, protocol", "fusions", "verdict", "utterances", *METRICS), rows)


def _ratio(ratio: Ratio | None) -> str:
    return "absent" if ratio is None else f"{ratio.verdict} {ratio.median:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]"


def _relative(path: Path, base: Path) -> str:
    return path.resolve().relative_to(base.resolve()).as_posix()


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [heading, "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """One cell of a table; a record's text breaks neither row nor column."""
    return " ".join(text.replace("|", "/").split())
