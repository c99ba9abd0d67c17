"""``voxfuse gate``: exit status, what goes to stdout, and errors that say what to do."""

import json

import pytest
from tone_stack import TEXTS, TonePatches, ToneReader, ToneStack
from typer.testing import CliRunner

from voxfuse.__main__ import app
from voxfuse.e2e import command
from voxfuse.e2e.asr import AsrMissing
from voxfuse.e2e.stack import WeightsMissing
from voxfuse.records import GateVerdict, from_json


@pytest.fixture
def stack(monkeypatch):
    """The tone stack in place of Kokoro; ``stack.change`` is what the patches do."""
    stack = ToneStack()
    stack.change, stack.asked = (lambda audio: audio), []

    def apply_patches(*targets, **options):
        stack.asked.append((targets, options))
        return TonePatches(stack, stack.change)

    monkeypatch.setattr(command, "driver", lambda name: stack)
    monkeypatch.setattr(command, "load_texts", lambda limit: list(TEXTS[:limit]))
    monkeypatch.setattr(command, "WhisperTranscriber", lambda model: ToneReader())
    monkeypatch.setattr("voxfuse.patches.apply_patches", apply_patches)
    return stack


def run(*arguments):
    return CliRunner().invoke(app, ["gate", *map(str, arguments)])


def test_a_cpu_ends_with_3_and_a_table(stack, tmp_path):
    result = run("--device", "cpu", "--out", tmp_path / "run", "--sentences", 32)
    assert result.exit_code == 3, result.output
    assert "NOT-JUDGED" in result.stdout and "not-judged: throughput improves, RTF p50" in result.stdout
    assert "speaking" not in result.stdout and "speaking" in result.stderr
    targets, options = stack.asked[0]
    assert targets == ("tones",) and options["policy"] == "all" and options["backend"] == "reference"
    assert (tmp_path / "run" / "verdict.json").exists()


def test_a_fault_ends_with_1_and_json_is_the_verdict(stack, tmp_path):
    stack.change = lambda audio: audio * 0.5
    result = run("--device", "cpu", "--out", tmp_path / "run", "--json")
    assert result.exit_code == 1
    verdict = from_json(result.stdout, GateVerdict)
    assert verdict.verdict == "fail" and verdict == from_json(
        (tmp_path / "run" / "verdict.json").read_bytes(), GateVerdict
    )


def test_speaking_and_scoring_apart_give_the_same_verdict(stack, tmp_path):
    spoken = run("--device", "cpu", "--out", tmp_path / "run", "--generate-only")
    assert spoken.exit_code == 0 and "--score-only" in spoken.stdout
    assert not (tmp_path / "run" / "verdict.json").exists()
    stack.asked.clear()
    result = run("--score-only", "--out", tmp_path / "run", "--json")
    assert result.exit_code == 3 and stack.asked == []
    assert {guard["outcome"] for guard in json.loads(result.stdout)["guards"]} == {"pass", "not-judged"}


def test_extension_is_spoken_when_asked(stack, tmp_path):
    protocol = tmp_path / "mine.json"
    content = command.load_protocol("smoke", 3).content
    protocol.write_text(json.dumps({**content, "wer": {**content["wer"], "extension_repetitions": 1}}))
    common = ("--device", "cpu", "--protocol", protocol, "--out", tmp_path / "run", "--generate-only")
    assert run(*common).exit_code == 0 and len(stack.spoken) == 6
    assert run(*common, "--extend").exit_code == 0 and len(stack.spoken) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--protocol", "fast"), "expected one of smoke, full"),
        (("--generate-only", "--score-only"), "exclude each other"),
        (("--extend",), "goes with"),
        (("--fusions", "adain_snake,nonsense"), "no fusion named"),
        (("--device", "cuda"), "use --device cpu"),
        (("--score-only",), "holds no run"),
        (("--sentences", "0"), "sentences"),
        (("--device", "banana"), "expected cpu, cuda or cuda:N, got 'banana'"),
        (("--device", "cuda:x"), "expected cpu, cuda or cuda:N, got 'cuda:x'"),
        (("--score-only", "--sentences", "3", "--fusions", "tone"), "--score-only does not use --sentences, --fusions"),
        (("--score-only", "--protocol", "full"), "--score-only does not use --protocol: leave it out"),
        (("--score-only", "--stack", "kokoro"), "--score-only does not use --stack"),
    ],
)
def test_usage_ends_with_2_and_says_what_was_expected(stack, tmp_path, arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("--out", tmp_path / "run", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("place", ["file", "file/run"])
@pytest.mark.parametrize("step", [("--device", "cpu"), ("--score-only",)])
def test_a_file_in_place_of_the_folder_ends_with_2(stack, tmp_path, place, step):
    (tmp_path / "file").write_text("mine")
    result = run("--out", tmp_path / place, *step)
    assert result.exit_code == 2 and "is a file: expected a folder" in " ".join(
        result.output.replace("│", " ").replace("\n", " ").split()
    )
    assert (tmp_path / "file").read_text() == "mine" and stack.spoken == []


def test_a_gpu_that_is_not_there_ends_with_2(stack, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = run("--device", "cuda:2", "--out", tmp_path / "run")
    assert result.exit_code == 2 and "torch sees 2 GPUs" in result.output


def test_a_run_spoken_on_a_gpu_is_found_by_its_names_without_one(stack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("--score-only", "--stack", "tones", "--device", "cuda")
    assert result.exit_code == 2 and "runs/gate-tones-cuda holds no run" in " ".join(result.output.split())


@pytest.mark.parametrize("error", [WeightsMissing("install these weights"), ImportError("install kokoro")])
def test_what_is_missing_ends_with_2(stack, tmp_path, monkeypatch, error):
    def load(*_arguments):
        raise error

    monkeypatch.setattr(stack, "load", load)
    result = run("--device", "cpu", "--out", tmp_path / "run")
    assert result.exit_code == 2 and f"voxfuse gate: {error}" in result.stderr


def test_a_missing_asr_is_told_before_anything_is_spoken(stack, tmp_path, monkeypatch):
    def missing(_model):
        raise AsrMissing("no such model")

    monkeypatch.setattr(command, "WhisperTranscriber", missing)
    result = run("--device", "cpu", "--out", tmp_path / "run", "--asr", "large")
    assert result.exit_code == 2 and "no such model" in result.stderr and stack.spoken == []


def test_another_run_in_the_folder_ends_with_2(stack, tmp_path):
    run("--device", "cpu", "--out", tmp_path / "run", "--sentences", 3)
    result = run("--device", "cpu", "--out", tmp_path / "run", "--sentences", 4)
    assert result.exit_code == 2 and "holds another run: protocol_sha256" in result.stderr


def test_an_interruption_says_that_the_folder_resumes(stack, tmp_path):
    stack.breaks_at = 7
    result = run("--device", "cpu", "--out", tmp_path / "run")
    assert result.exit_code == 2 and "repeat the command" in result.stderr
    stack.breaks_at = None
    assert run("--device", "cpu", "--out", tmp_path / "run").exit_code == 3
    assert len(stack.spoken) == 7 + 2 * 29  # three pairs and one arm, then the other 29 pairs


def test_no_asr_is_needed_where_no_words_can_be_heard(stack, tmp_path, monkeypatch):
    def absent(model):
        raise AsrMissing("no ASR here")

    monkeypatch.setattr(command, "WhisperTranscriber", absent)
    asked = ("--device", "cpu", "--out", tmp_path / "run", "--sentences", 1)
    assert run(*asked).exit_code == 2
    stack.unintelligible = "synthetic weights"
    result = run(*asked)
    assert result.exit_code == 3 and "WER ceiling, WER non-inferior: synthetic weights" in result.stdout
    assert run("--score-only", "--out", tmp_path / "run").exit_code == 3
    assert run(*asked, "--model-dir", tmp_path).exit_code == 2  # real weights speak
