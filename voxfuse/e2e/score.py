"""Scoring: a run directory transcribed and judged. Everything here can be computed again from that directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import msgspec

from voxfuse.e2e import guards as judge
from voxfuse.e2e import metrics as figures
from voxfuse.e2e.asr import AudioUnreadable, Transcriber
from voxfuse.e2e.generate import Notify, stopped_early
from voxfuse.e2e.rundir import RunDirectory, Transcript
from voxfuse.e2e.statistics import Cluster, NonInferiority, margin_of, non_inferiority
from voxfuse.e2e.wer import Edits, corpus_wer, count_edits, macro_wer, normalizer_sha256
from voxfuse.records import ArmUtterance, GateVerdict, Guard, Metric, Utterance, to_json


class Errors(NamedTuple):
    """Word edits of every utterance in both arms, in the order of the utterances."""

    baseline: tuple[Edits, ...]
    patched: tuple[Edits, ...]


def score(run: RunDirectory, asr: Transcriber, notify: Notify) -> GateVerdict:
    """Transcribe every distinct audio once, judge all guards and write verdict.json.

    An audio that the ASR cannot read is that output's failure. Where the fidelity tier stopped the run early, nothing
    is transcribed: the verdict is settled. Nor is it where the run says that no words can be heard.
    """
    protocol = run.protocol
    stopped = stopped_early(run)
    repetitions = repetitions_of(run)
    expected = [(text.id, repetition) for repetition in range(repetitions) for text in run.texts]
    silent = run.header.unintelligible
    heard = {} if stopped or silent else transcribe(run, asr, notify)
    utterances = build_utterances(run, expected, heard)
    blocks = run.blocks()

    guards = [judge.completeness(len(utterances), len(expected), stopped)]
    guards += judge.fidelity(utterances, protocol.fidelity)
    guards += judge.oracle(utterances)
    transcribed = not (stopped or silent)
    guards.append(judge.rows_valid(utterances, transcribed))
    guards += judge.new_faults(utterances, protocol.rows, transcribed)
    metrics: list[Metric] = []
    if not transcribed or not any(item.reference_words for item in utterances):
        why = "the fidelity tier failed" if stopped else silent or "no words were spoken"
        guards += judge.not_judged(protocol, why)
    else:
        wer_guards, wer_metrics = judge_wer(run, utterances)
        guards += wer_guards
        metrics += wer_metrics
    metrics += figures.fidelity_metrics(utterances)
    guards += judge.receipts(run.receipts(), run.header.fusions)
    guards += judge_speed(run)
    metrics += figures.timing_metrics(utterances, blocks)
    metrics += figures.stage_metrics(utterances, None if run.header.device.startswith("cuda") else figures.NO_GPU)
    memory = run.peak_memory()
    metrics.append(
        figures.paired_metric(
            "peak GPU memory",
            "bytes",
            memory.get("baseline"),
            memory.get("patched"),
            not_judged=None if len(memory) == 2 else figures.NO_GPU,
        )
    )

    outcome, reasons = judge.verdict_of(guards)
    verdict = GateVerdict(
        protocol=protocol.name,
        protocol_sha256=run.header.protocol_sha256,
        stack=run.header.stack,
        stack_version=run.header.stack_version,
        weights=run.header.weights,
        asr=asr.identity if transcribed else None,
        normalizer_sha256=normalizer_sha256() if transcribed else None,
        fusions=run.header.fusions,
        environment=run.header.environment,
        workload=run.header.workload,
        repetitions=repetitions,
        metrics=tuple(metrics),
        guards=tuple(guards),
        receipts=run.receipts(),
        utterances=tuple(utterances),
        blocks=blocks,
        verdict=outcome,
        reasons=reasons,
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    run.put_verdict(to_json(verdict))
    return verdict


def repetitions_of(run: RunDirectory) -> int:
    """How many repetitions the run has: the protocol's, or more once its extension has begun."""
    return max([run.protocol.repetitions, *(repetition + 1 for _, repetition in run.pairs())])


def transcribe(run: RunDirectory, asr: Transcriber, notify: Notify) -> dict[str, Transcript]:
    """What the ASR hears in every distinct audio of the run, by hash; heard once, kept in transcripts.jsonl."""
    heard = run.transcripts(asr.identity)
    audio = list(
        dict.fromkeys(
            row.output.audio_sha256 for pair in run.pairs().values() for row in pair if row.output.audio_sha256
        )
    )
    for done, sha256 in enumerate(audio):
        notify("transcribing", done, len(audio))
        if sha256 in heard:
            continue
        try:
            row = Transcript(asr=asr.identity, audio_sha256=sha256, text=asr.transcribe(run.audio_path(sha256)))
        except AudioUnreadable as error:
            row = Transcript(
                asr=asr.identity, audio_sha256=sha256, text=None, failure=f"the ASR cannot read it: {error}"
            )
        run.append("transcripts.jsonl", [row])
        heard[sha256] = row
    notify("transcribing", len(audio), len(audio))
    return heard


def build_utterances(
    run: RunDirectory, expected: Iterable[tuple[str, int]], heard: dict[str, Transcript]
) -> list[Utterance]:
    """One record per pair spoken, in the order of the texts, with transcripts and edits where there are any."""
    texts = {text.id: text.text for text in run.texts}
    pairs = run.pairs()
    utterances = []
    for key in expected:
        if key not in pairs:
            continue
        baseline, patched = pairs[key]
        reference = texts[baseline.id]
        utterances.append(
            Utterance(
                id=baseline.id,
                repetition=baseline.repetition,
                seed=baseline.seed,
                reference_words=count_edits(reference, None).words,
                baseline=_with_transcript(baseline.output, reference, heard),
                patched=_with_transcript(patched.output, reference, heard),
                snr_db=patched.snr_db,
                log_spectrum_l1=patched.log_spectrum_l1,
            )
        )
    return utterances


def judge_wer(run: RunDirectory, utterances: Sequence[Utterance]) -> tuple[list[Guard], list[Metric]]:
    """Tiers 1 and 2 from the edits recorded; an output without transcript counts every word as lost."""
    rules = run.protocol.wer
    errors = Errors(
        tuple(Edits(_edits(item, item.baseline), item.reference_words) for item in utterances),
        tuple(Edits(_edits(item, item.patched), item.reference_words) for item in utterances),
    )
    baseline, patched = corpus_wer(errors.baseline), corpus_wer(errors.patched)
    test = compare_wer(utterances, errors, run, baseline)
    metrics = [
        Metric(
            name="corpus WER",
            unit="%",
            baseline=100 * baseline,
            patched=100 * patched,
            delta=100 * test.delta,
            low=100 * test.low,
            high=100 * test.high,
        ),
        figures.paired_metric("macro WER", "%", 100 * macro_wer(errors.baseline), 100 * macro_wer(errors.patched)),
        Metric(name="utterances whose edits differ", unit="", baseline=test.clusters, patched=test.differing),
    ]
    return judge.word_error_rate(baseline, patched, test, rules), metrics


def compare_wer(
    utterances: Sequence[Utterance], errors: Errors, run: RunDirectory, baseline_wer: float
) -> NonInferiority:
    """The non-inferiority test with an utterance's repetitions as one cluster."""
    rules = run.protocol.wer
    clusters: dict[str, Cluster] = {}
    for item, before, after in zip(utterances, errors.baseline, errors.patched, strict=True):
        words, base, patched = clusters.get(item.id, Cluster(0, 0, 0))
        clusters[item.id] = Cluster(words + before.words, base + before.edits, patched + after.edits)
    return non_inferiority(
        list(clusters.values()),
        margin=margin_of(baseline_wer, rules.margin_pp / 100, rules.margin_relative),
        confidence=rules.confidence,
        resamples=rules.resamples,
        seed=run.protocol.seed,
        exact_below=rules.exact_below,
        edits_per_change=rules.edits_per_change,
        repetitions=max(Counter(item.id for item in utterances).values()),
    )


def judge_speed(run: RunDirectory) -> list[Guard]:
    """Throughput, RTF, latency and peak memory: judged on a GPU only."""
    rules = run.protocol.throughput
    blocks = run.blocks()
    same, paired = figures.of_kind(blocks, "a/a"), figures.of_kind(blocks, "a/b")
    guards = [judge.throughput(figures.throughput_ratio(paired), figures.throughput_ratio(same), len(paired), rules)]
    ratios: dict[str, float] = {}
    noise: dict[str, float] = {}
    for found, timed in ((ratios, paired), (noise, same)):
        if timed:
            baseline, patched = (timing.figures() for timing in figures.block_timings(timed))
            found.update({name: patched[name] / baseline[name] for name in figures.LESS_IS_BETTER})
    for name in figures.LESS_IS_BETTER:
        spread = abs(noise[name] - 1) if name in noise else None
        guards.append(judge.no_regression(name, ratios.get(name), spread, rules, figures.NO_GPU))
    memory = run.peak_memory()
    guards.append(judge.peak_memory(memory.get("baseline"), memory.get("patched"), rules, figures.NO_GPU))
    return guards


def _edits(item: Utterance, output: ArmUtterance) -> int:
    return item.reference_words if output.edits is None else output.edits


def _with_transcript(output: ArmUtterance, reference: str, heard: dict[str, Transcript]) -> ArmUtterance:
    if output.audio_sha256 is None or output.audio_sha256 not in heard:
        return output
    transcript = heard[output.audio_sha256]
    edits = count_edits(reference, transcript.text).edits
    return msgspec.structs.replace(output, hypothesis=transcript.text, edits=edits, failure=transcript.failure)
