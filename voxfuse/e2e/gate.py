"""The gate: speak both arms into a run directory, score it, and show the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from voxfuse.e2e.asr import Transcriber
from voxfuse.e2e.generate import Notify, Patches, speak, time_blocks
from voxfuse.e2e.protocol import Declared
from voxfuse.e2e.rundir import RunDirectory, RunHeader, texts_sha256
from voxfuse.e2e.score import repetitions_of, score
from voxfuse.e2e.stack import Stack, Text
from voxfuse.profiles.environment import capture_environment, version_of
from voxfuse.records import GateOutcome, GateVerdict, Metric, Receipt

Apply = Callable[[tuple[str, ...]], Patches]  # names of fusions to leave out -> what was applied
PACKAGES = ("transformers", "numpy", "soundfile", "faster-whisper", "ctranslate2", "jiwer", "whisper-normalizer")
EXIT_STATUS: dict[GateOutcome, int] = {"pass": 0, "fail": 1, "inconclusive": 3, "not-judged": 3}
COLOURS: dict[GateOutcome, str] = {"pass": "green", "fail": "red", "inconclusive": "yellow", "not-judged": "cyan"}


class NothingApplied(RuntimeError):
    """No fusion was applied, so there is nothing to judge; the message gives the receipts' reasons."""


def generate(
    stack: Stack,
    apply: Apply,
    declared: Declared,
    texts: Sequence[Text],
    directory: Path,
    notify: Notify,
    *,
    device: str,
    backend: str,
    extend: bool = False,
    measure_memory: Callable[[RunDirectory], None] | None = None,
) -> RunDirectory:
    """Speak every text in both arms; on a GPU time blocks (A/A, A/B, each fusion left out) and peak memory.

    The stack is loaded. What the directory already holds of the same run is kept. ``extend`` adds the repetitions of
    the protocol's one extension. Raises NothingApplied, and RunMismatch where the directory holds another run.
    """
    protocol, rules = declared.protocol, declared.protocol.throughput
    patches = apply(())
    try:
        fusions = applied_fusions(patches.receipts)
        header = RunHeader(
            protocol=declared.content,
            protocol_sha256=declared.sha256,
            stack=stack.name,
            stack_version=version_of(stack.distribution) or "not a distribution",
            weights=stack.weights,
            sample_rate=stack.sample_rate,
            device=device,
            backend=backend,
            fusions=fusions,
            texts_sha256=texts_sha256(texts),
            environment=capture_environment((stack.distribution, *PACKAGES)),
            workload=describe_workload(stack, texts),
            unintelligible=getattr(stack, "unintelligible", None),
            created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        run = RunDirectory.create(directory, header, texts)
        declared_repetitions = protocol.repetitions + (protocol.wer.extension_repetitions if extend else 0)
        complete = speak(run, stack, patches, range(max(declared_repetitions, repetitions_of(run))), notify)
        if not complete or not device.startswith("cuda"):
            return run
        time_blocks(run, stack, patches, "a/a", rules.aa_pairs, notify)
        time_blocks(run, stack, patches, "a/b", rules.pairs, notify)
    finally:
        patches.revert()
    for fusion in fusions if len(fusions) > 1 and rules.leave_one_out_pairs else ():
        rest = apply((fusion,))
        try:
            time_blocks(run, stack, rest, f"without:{fusion}", rules.leave_one_out_pairs, notify)
        finally:
            rest.revert()
    if measure_memory is not None:
        measure_memory(run)
    return run


def extension_due(run: RunDirectory, verdict: GateVerdict) -> bool:
    """Whether the protocol's one extension should be spoken: only the WER's sample is too small, nothing failed."""
    return (
        run.protocol.wer.extension_repetitions > 0
        and verdict.repetitions == run.protocol.repetitions
        and verdict.verdict != "fail"
        and any(guard.name == "WER non-inferior" and guard.outcome == "inconclusive" for guard in verdict.guards)
    )


def run_gate(speak_into: Callable[[bool], RunDirectory], asr: Transcriber, notify: Notify) -> GateVerdict:
    """Speak, score, and extend once where the word error rate is inconclusive. ``speak_into(extend)`` speaks."""
    run = speak_into(False)
    verdict = score(run, asr, notify)
    if extension_due(run, verdict):
        verdict = score(speak_into(True), asr, notify)
    return verdict


def applied_fusions(receipts: Sequence[Receipt]) -> tuple[str, ...]:
    """The names of the fusions applied. Raises NothingApplied where there are none."""
    names = tuple(sorted({receipt.fusion for receipt in receipts if receipt.status == "applied"}))
    if not names:
        reasons = "; ".join(f"{item.fusion} on {item.target}: {item.status}, {item.reason}" for item in receipts)
        raise NothingApplied(f"no fusion was applied, so there is nothing to judge ({reasons or 'no receipts'})")
    return names


def describe_workload(stack: Stack, texts: Sequence[Text]) -> dict[str, int | float | str | bool | None]:
    """What is spoken, and the part of the workload matrix that is not covered."""
    supported = stack.workload
    missing = ["concurrency above 1", "streaming", "reference audio", "languages other than English"]
    words = sorted(len(text.text.split()) for text in texts)
    return {
        "texts": len(texts),
        "words_shortest": words[0],
        "words_median": words[len(words) // 2],
        "words_longest": words[-1],
        "concurrency": 1,
        "streaming": False,
        "reference_audio": False,
        "language": "en",
        "not_covered": ", ".join(missing),
        "stack_supports": ", ".join(
            [name for name in ("streaming", "concurrency", "reference_audio") if getattr(supported, name)]
            + [f"language {language}" for language in supported.languages]
        ),
    }


def show(verdict: GateVerdict, console: Console) -> None:
    """Print the verdict as tables: figures, guards, and the verdict with its reasons."""
    console.print(Group(_metrics_table(verdict), _guards_table(verdict)))
    colour = COLOURS[verdict.verdict]
    console.print(f"[bold {colour}]{verdict.verdict.upper()}[/]  {', '.join(verdict.fusions)} on {verdict.stack}")
    for reason in verdict.reasons:
        console.print(f"  {reason}", markup=False, highlight=False)


def _metrics_table(verdict: GateVerdict) -> Table:
    table = Table(title=f"{verdict.stack} {verdict.stack_version}, protocol {verdict.protocol}", title_justify="left")
    for column, justify in (("metric", "left"), ("untouched", "right"), ("patched", "right"), ("delta", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("95 % limits")
    table.add_column("not judged")
    for metric in verdict.metrics:
        interval = "" if metric.low is None or metric.high is None else f"{metric.low:+.4g} … {metric.high:+.4g}"
        table.add_row(
            f"{metric.name} [{metric.unit}]".replace(" []", "").replace("[", r"\["),
            _figure(metric, metric.baseline),
            _figure(metric, metric.patched),
            "" if metric.delta is None else f"{metric.delta:+.4g}",
            interval,
            metric.not_judged or "",
        )
    return table


def _guards_table(verdict: GateVerdict) -> Table:
    table = Table(title=f"guards, {len(verdict.utterances)} utterances in both arms", title_justify="left")
    for column in ("guard", "outcome", "value", "limit"):
        table.add_column(column, justify="right" if column in ("value", "limit") else "left")
    table.add_column("detail", overflow="fold")
    for guard in verdict.guards:
        table.add_row(
            guard.name,
            f"[{COLOURS[guard.outcome]}]{guard.outcome}[/]",
            "" if guard.value is None else f"{guard.value:.4g}",
            "" if guard.limit is None else f"{guard.limit:.4g}",
            guard.detail.replace("[", r"\["),
        )
    return table


def _figure(metric: Metric, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if metric.unit in ("", "bytes") and float(value).is_integer() else f"{value:.4g}"
