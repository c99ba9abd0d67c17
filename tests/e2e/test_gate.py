"""The whole gate on a small stack: what passes, what is refused and why, and what an interrupted run keeps."""

import json

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from tone_gate import COUNT, Case, failed, outcomes, protocol_of, silent
from tone_stack import RATE_HZ, WORDS, ToneReader

from voxfuse.e2e.gate import NothingApplied, run_gate, show
from voxfuse.e2e.rundir import RunDirectory, RunMismatch
from voxfuse.e2e.score import score
from voxfuse.e2e.stack import Speech
from voxfuse.records import GateVerdict, read


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path / "run")


def test_the_same_code_passes_all_that_a_cpu_can_judge(case):
    verdict = case.verdict()
    assert verdict.verdict == "not-judged" and failed(verdict) == set()
    assert outcomes(verdict)["WER non-inferior"] == "pass"
    assert {guard.detail for guard in verdict.guards if guard.outcome == "not-judged"} == {"no GPU"}
    assert len(case.reader.heard) == COUNT  # identical audio is transcribed once
    assert all(item.baseline.hypothesis == item.patched.hypothesis for item in verdict.utterances)
    assert read(case.path / "verdict.json") == verdict


def test_both_arms_have_the_seed_and_run_their_own_code(case):
    case.speak(lambda audio: audio * 1.0001)
    seeds = {}
    for identity, seed in case.stack.spoken:
        seeds.setdefault(identity, []).append(seed)
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in seeds.values())
    rows = RunDirectory.open(case.path).pairs()
    assert all(base.output.audio_sha256 != patched.output.audio_sha256 for base, patched in rows.values())
    assert all(base.snr_db is None and 79 < patched.snr_db < 81 for base, patched in rows.values())  # 20·log10(1e4)


def test_rounding_is_accepted_and_reported(case):
    verdict = case.verdict(lambda audio: audio * (1 + 1e-6))
    assert failed(verdict) == set()
    metrics = {metric.name: metric for metric in verdict.metrics}
    assert metrics["SNR, worst"].patched > 100 and metrics["bit-identical outputs"].patched == 0
    assert len(case.reader.heard) == 2 * COUNT


def test_a_quiet_fault_stops_early_and_fails(case):
    verdict = case.verdict(lambda audio: audio + 0.05 * torch.sin(torch.arange(len(audio)) * 1.0))
    assert verdict.verdict == "fail" and "fidelity, worst" in failed(verdict)
    assert len(verdict.utterances) == 1 and case.reader.heard == [] and verdict.asr is None
    assert outcomes(verdict)["complete"] == "not-judged"


def test_without_stopping_early_everything_is_spoken_and_transcribed(case):
    declared = protocol_of(fidelity={"stop_early": False})
    verdict = case.verdict(lambda audio: audio * 0.5, declared)
    assert failed(verdict) == {"fidelity, worst", "fidelity, median SNR", "fidelity, median log-spectrum L1"}
    assert len(verdict.utterances) == COUNT and outcomes(verdict)["WER non-inferior"] == "pass"


def test_word_errors_are_refused_where_fidelity_allows_them(case):
    def drop_last_word(audio):
        audio = audio.clone()
        audio[-int(0.2 * RATE_HZ) :] *= 1e-3
        return audio

    blind = {
        "snr_db_worst": -300.0,
        "snr_db_median": -300.0,
        "log_spectrum_l1_median": 99.0,
        "log_spectrum_l1_worst": 99.0,
    }
    verdict = case.verdict(drop_last_word, protocol_of(fidelity=blind))
    assert failed(verdict) == {"WER non-inferior"}
    words = [item.reference_words for item in verdict.utterances]
    assert sum(item.patched.edits for item in verdict.utterances) == COUNT
    metric = next(metric for metric in verdict.metrics if metric.name == "corpus WER")
    assert metric.baseline == 0 and metric.patched == pytest.approx(100 * COUNT / sum(words))


@pytest.mark.parametrize(
    ("change", "guard"),
    [
        (lambda audio: audio * torch.nan, "new NaN"),
        (lambda audio: audio / 0, "new NaN"),
        (lambda audio: audio * 0 + 1e-5, "new silence"),
        (lambda audio: audio.repeat(4), "new runaways"),
        (lambda audio: audio * 100, "new clipping"),
        (lambda audio: audio[:0], "new failures"),
        (lambda audio: audio[:0, None], "new failures"),
        (lambda audio: audio.reshape(-1, 2)[:, :1].repeat(1, 3).T.sum(9), "new failures"),  # raises
    ],
)
def test_faulty_audio_is_a_failure_with_a_reason_not_a_crash(case, change, guard):
    case.stack.synthesize = _without_noise(case.stack)
    verdict = case.verdict(change, protocol_of(sentences=3, fidelity={"stop_early": False}))
    assert verdict.verdict == "fail" and guard in failed(verdict)
    json.loads((case.path / "verdict.json").read_text())


def _without_noise(stack):
    def synthesize(text, seed):
        words = torch.tensor([float(WORDS.index(word)) for word in text.text.split()])
        return Speech(stack.model(words).numpy(), {})

    return synthesize


def test_a_text_that_fails_in_both_arms_is_no_new_failure_but_invalid(case):
    speak = case.stack.synthesize

    def synthesize(text, seed):
        if text.id == "t001":
            raise RuntimeError("nothing to say")
        return speak(text, seed)

    case.stack.synthesize = synthesize
    verdict = case.verdict()
    assert failed(verdict) == {"every output valid"}
    assert "RuntimeError: nothing to say" in next(g.detail for g in verdict.guards if g.name == "every output valid")


def test_an_audio_that_the_asr_cannot_read_is_that_output_s_failure(case):
    run = case.speak()
    victim = next(iter(run.pairs().values()))[1].output.audio_sha256
    run.audio_path(victim).write_bytes(b"not a FLAC")
    verdict = score(run, case.reader, silent)
    assert verdict.verdict == "fail" and "every output valid" in failed(verdict)
    broken = [item for item in verdict.utterances if item.patched.audio_sha256 == victim]
    assert len(broken) == 1 and "cannot read it" in broken[0].patched.failure
    assert broken[0].patched.edits == broken[0].reference_words


def test_a_fusion_that_never_ran_fails(case):
    assert failed(case.verdict(fires=False)) == {"fusions fired"}


def test_a_fusion_that_fell_back_fails(case):
    verdict = case.verdict(falls_back="too long")
    assert failed(verdict) == {"no fallback"}
    assert "too long" in next(guard.detail for guard in verdict.guards if guard.name == "no fallback")
    assert verdict.receipts[0].calls == COUNT


def test_nothing_applied_is_no_verdict(case):
    with pytest.raises(NothingApplied, match=r"tone on Tones\.forward: skipped, as asked"):
        case.speak(status="skipped")
    assert not case.path.exists()


def test_an_interrupted_run_keeps_its_outputs_and_resumes(case):
    case.stack.breaks_at = 2 * 5 + 1  # in the middle of the sixth pair
    with pytest.raises(KeyboardInterrupt):
        case.speak()
    assert case.stack.model.forward.__func__ is type(case.stack.model).forward  # reverted
    run = RunDirectory.open(case.path)
    assert len(run.pairs()) == 5 and run.receipts()[0].calls > 0
    partial = score(run, case.reader, silent)
    assert outcomes(partial)["complete"] == "inconclusive"
    case.stack.breaks_at = None
    before = len(case.stack.spoken)
    verdict = case.verdict()
    assert len(case.stack.spoken) - before == 2 * (COUNT - 5)
    assert len(case.reader.heard) == COUNT and outcomes(verdict)["complete"] == "pass"
    spoken = len(case.stack.spoken)
    again = case.verdict()
    assert len(case.stack.spoken) == spoken and len(case.reader.heard) == COUNT  # nothing done twice
    assert again.guards == verdict.guards and again.utterances == verdict.utterances


def test_another_protocol_does_not_resume(case):
    case.speak()
    with pytest.raises(RunMismatch, match="protocol_sha256"):
        case.speak(declared=protocol_of(rows={"runaway_ratio": 2.0}))


def test_one_extension_where_the_sample_is_too_small(case):
    declared = protocol_of(sentences=4, wer={"margin_pp": 6.0, "extension_repetitions": 2})
    looks = []

    def speak_into(extend):
        looks.append(extend)
        return case.speak(declared=declared, extend=extend)

    verdict = run_gate(speak_into, case.reader, silent)
    assert looks == [False, True] and verdict.repetitions == 3 and len(verdict.utterances) == 12
    # Nothing differs, so the exact bound holds, and further repetitions of the same texts cannot sharpen it.
    assert outcomes(verdict)["WER non-inferior"] == "inconclusive"
    assert len({item.seed for item in verdict.utterances}) == 12
    run_gate(speak_into, case.reader, silent)
    assert looks == [False, True, False]  # an extended run is not extended again


def test_score_is_the_same_from_the_folder_alone(case):
    verdict = case.verdict(lambda audio: audio * (1 + 1e-6))
    (case.path / "verdict.json").unlink()
    again = score(RunDirectory.open(case.path), ToneReader(), silent)
    assert msgspec.structs.replace(again, measured_at="") == msgspec.structs.replace(verdict, measured_at="")


def test_the_table_says_what_matters(case):
    verdict = case.verdict(lambda audio: audio * 0.5)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(verdict, console)
    text = console.export_text()
    for expected in ("fidelity, worst", "FAIL", "SNR 6.0 dB is below 18 dB", "tone on tones", "throughput, audio"):
        assert expected in text


def test_verdict_survives_json(case):
    verdict = case.verdict()
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=GateVerdict) == verdict
    assert np.isfinite([metric.patched for metric in verdict.metrics if metric.patched is not None]).all()
