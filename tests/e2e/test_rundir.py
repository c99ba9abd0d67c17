"""The run directory keeps what was measured: torn lines, resumption, another run's folder, damaged files."""

import msgspec
import numpy as np
import pytest
import soundfile
from tone_stack import TEXTS

from voxfuse.e2e.fidelity import audio_sha256
from voxfuse.e2e.protocol import load_protocol
from voxfuse.e2e.rundir import PeakMemory, RunDirectory, RunHeader, RunMismatch, Spoken, Transcript, texts_sha256
from voxfuse.profiles.environment import capture_environment
from voxfuse.records import ArmUtterance, Receipt


def header_of(**changes):
    declared = load_protocol("smoke", sentences=3)
    header = RunHeader(
        protocol=declared.content,
        protocol_sha256=declared.sha256,
        stack="tones",
        stack_version="1",
        weights="none",
        sample_rate=8000,
        device="cpu",
        backend="reference",
        fusions=("tone",),
        texts_sha256=texts_sha256(TEXTS[:3]),
        environment=capture_environment(),
        workload={},
        created_at="2025-01-01T00:00:00+00:00",
    )
    return msgspec.structs.replace(header, **changes)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", header_of(), TEXTS[:3])


def row(arm, repetition=0, **output):
    output = {"audio_sha256": "a" * 64, "audio_s": 1.0, **output}
    return Spoken(id="t000", repetition=repetition, arm=arm, seed=1, output=ArmUtterance(**output))


def test_round_trip(run):
    again = RunDirectory.open(run.path)
    assert again.header == run.header and again.texts == TEXTS[:3] and again.protocol == run.protocol


def test_a_pair_counts_when_both_arms_are_there(run):
    run.append("utterances.jsonl", [row("baseline")])
    assert run.pairs() == {}
    run.append("utterances.jsonl", [row("patched")])
    assert run.pairs() == {("t000", 0): (row("baseline"), row("patched"))}


def test_a_later_row_replaces_an_earlier_one(run):
    run.append("utterances.jsonl", [row("baseline"), row("patched")])
    run.append("utterances.jsonl", [row("patched", failure="worse")])
    assert run.pairs()["t000", 0][1].output.failure == "worse"


def test_a_torn_last_line_is_dropped_and_written_over(run):
    run.append("utterances.jsonl", [row("baseline"), row("patched")])
    path = run.path / "utterances.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id":"t001","repeti')
    assert len(run.pairs()) == 1
    run.append("utterances.jsonl", [row("baseline", 1), row("patched", 1)])
    assert len(run.pairs()) == 2 and b"repeti{" not in path.read_bytes()


def test_a_damaged_line_in_the_middle_is_named(run):
    run.append("utterances.jsonl", [row("baseline"), row("patched")])
    path = run.path / "utterances.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(RunMismatch, match=r"utterances\.jsonl, line 1"):
        run.pairs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stack": "kokoro"}, "stack is 'tones' there, 'kokoro' here"),
        ({"weights": "others"}, "weights"),
        ({"fusions": ("a", "b")}, "fusions"),
        ({"backend": "triton"}, "backend"),
        ({"protocol_sha256": "0" * 64}, "protocol_sha256"),
        ({"texts_sha256": "0" * 64}, "texts_sha256"),
    ],
)
def test_another_run_is_not_resumed(run, change, message):
    with pytest.raises(RunMismatch, match=message):
        RunDirectory.create(run.path, header_of(**change), TEXTS[:3])


@pytest.mark.parametrize("name", ["torch", "triton", "commit", "voxfuse", "gpu"])
def test_a_run_of_other_code_or_another_machine_is_not_resumed(run, name):
    environment = msgspec.structs.replace(run.header.environment, **{name: "another"})
    with pytest.raises(RunMismatch, match=f"environment.{name} is .* there, 'another' here"):
        RunDirectory.create(run.path, header_of(environment=environment), TEXTS[:3])


def test_the_same_run_is_resumed_whenever_it_began(run):
    again = RunDirectory.create(run.path, header_of(created_at="2026-01-01T00:00:00+00:00"), TEXTS[:3])
    assert again.header.created_at == run.header.created_at


def test_an_edited_protocol_or_text_is_refused(run):
    path = run.path / "run.json"
    original = path.read_text()
    path.write_text(original.replace('"margin_pp": 2.0', '"margin_pp": 9.0'))
    with pytest.raises(RunMismatch, match="does not have the hash beside it"):
        RunDirectory.open(run.path)
    path.write_text(original)
    texts = run.path / "texts.jsonl"
    texts.write_text(texts.read_text().replace("red", "blue", 1))
    with pytest.raises(RunMismatch, match="texts do not have the hash"):
        RunDirectory.open(run.path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunMismatch, match="holds no run"):
        RunDirectory.open(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunMismatch, match="not a gate run"):
        RunDirectory.open(tmp_path)


def test_audio_is_kept_once_and_survives_within_24_bit(run):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, 4000).astype(np.float32)
    sha256 = run.put_audio(samples)
    before = run.audio_path(sha256).stat().st_mtime_ns
    assert sha256 == audio_sha256(samples) == run.put_audio(samples.copy())
    assert run.audio_path(sha256).stat().st_mtime_ns == before
    read, rate = soundfile.read(run.audio_path(sha256))
    assert rate == 8000 and np.abs(read - samples).max() < 2**-22
    assert [path.suffix for path in (run.path / "audio").iterdir()] == [".flac"]


def test_audio_beyond_full_scale_is_clipped_not_wrapped(run):
    read, _ = soundfile.read(run.audio_path(run.put_audio(np.array([2.0, -3.0, 0.5] * 100, np.float32))))
    assert read[0] > 0.999 and read[1] < -0.999 and read[2] == 0.5


def test_paths_stay_inside_the_folder(run):
    with pytest.raises(ValueError, match="not an audio hash"):
        run.audio_path("../../etc/passwd")


def test_receipts_of_sessions_add_up(run):
    def receipt(calls, fallbacks):
        return Receipt(
            fusion="tone",
            stack="tones",
            target="t",
            count=1,
            status="applied",
            calls=calls,
            fallbacks=fallbacks,
            process_id=1,
        )

    run.append("receipts.jsonl", [receipt(3, {"long": 1})])
    run.append("receipts.jsonl", [receipt(4, {"long": 2, "short": 1})])
    (merged,) = run.receipts()
    assert merged.calls == 7 and merged.fallbacks == {"long": 3, "short": 1}


def test_transcripts_belong_to_their_asr(run):
    run.append("transcripts.jsonl", [Transcript(asr="one", audio_sha256="a", text="yes")])
    run.append("transcripts.jsonl", [Transcript(asr="two", audio_sha256="a", text=None, failure="no")])
    assert run.transcripts("one")["a"].text == "yes" and run.transcripts("two")["a"].failure == "no"
    assert run.transcripts("three") == {}


def test_peak_memory(run):
    run.append("memory.jsonl", [PeakMemory(arm="patched", peak_bytes=7)])
    assert run.peak_memory() == {"patched": 7}
