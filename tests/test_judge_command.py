"""``voxfuse judge``: the steps in order, going on where it stopped, another run's state, the gated sets, the status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tone_stack import TEXTS, TonePatches, ToneReader, ToneStack
from typer.testing import CliRunner
from verdicts import measured, verdict

from voxfuse.__main__ import app
from voxfuse.commands import bench as bench_command
from voxfuse.commands import gate_sets, hotspots, judge, judge_state
from voxfuse.commands.hotspots import Matches
from voxfuse.e2e import command
from voxfuse.evidence import ledger
from voxfuse.fusions.registry import FUSIONS
from voxfuse.microbench import bench as micro
from voxfuse.microbench.cases import JudgedCase
from voxfuse.patches import registry
from voxfuse.patches.spec import Patch
from voxfuse.records import GateVerdict, MicroVerdict, to_json

KNOWN = ("adain_leaky_relu", "adain_snake")  # what the profile asks for
ALL = tuple(sorted(name for name, fusion in FUSIONS.items() if "kokoro" in fusion.stacks))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kokoro's cases, with the tone stack speaking; ``stage.profiled`` counts profiles, ``stage.timed`` benches."""
    stack: Any = ToneStack()
    stack.profiled, stack.benched = [], []

    def profile(stack_name: str, device: str, folder: Path, known: tuple[str, ...], timeout_s: float) -> Matches:
        stack.profiled.append((stack_name, device, known))
        return Matches(KNOWN, "two of them")

    real = micro.judge

    def judged(*arguments: Any, **options: Any) -> MicroVerdict:
        stack.benched.append(arguments[0].fusion.name)
        return real(*arguments, **options)

    monkeypatch.setattr(judge, "matched_fusions", profile)
    monkeypatch.setattr(micro, "judge", judged)
    monkeypatch.setattr(command, "driver", lambda name: stack)
    monkeypatch.setattr(command, "load_texts", lambda limit: list(TEXTS[:limit]))
    monkeypatch.setattr(command, "WhisperTranscriber", lambda model: ToneReader())
    monkeypatch.setattr("voxfuse.patches.apply_patches", lambda *_, **__: TonePatches(stack, lambda audio: audio))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return stack


def run(folder: Path, *arguments: object) -> Any:
    fixed = ("--stack", "kokoro", "--device", "cpu", "--protocol", "smoke", "--sentences", 8, "--pairs", 30)
    return CliRunner().invoke(app, ["judge", *map(str, (*fixed, "--state", folder / "state", *arguments))])


@pytest.mark.slow
def test_all_steps_once_and_nothing_again(stage: Any, tmp_path: Path) -> None:
    result = run(tmp_path, "--json")
    assert result.exit_code == 3, result.output  # a CPU settles nothing
    report = json.loads(result.stdout)
    assert stage.profiled == [("kokoro", "cpu", ALL)] and sorted(stage.benched) == sorted(KNOWN)
    assert {row["fusion"] for row in report["micro"]} == set(KNOWN) and report["unfinished"] == []
    assert [gate["verdict"] for gate in report["gates"]] == ["inconclusive"]  # eight texts are too few
    assert [item["fusion"] for item in report["settled"]] == list(KNOWN)
    book = tmp_path / "state" / "ledger"
    assert report["ledger"] == str(book)
    written = [entry.verdict for entry in ledger.load([book])]
    assert sorted(type(item).__name__ for item in written) == ["GateVerdict", "MicroVerdict", "MicroVerdict"]
    spoken = len(stage.spoken)
    again = run(tmp_path)
    assert again.exit_code == 3 and len(stage.profiled) == 1 and len(stage.benched) == 2
    assert len(stage.spoken) == spoken and len(list(book.rglob("*.json"))) == 3
    assert f"export VOXFUSE_LEDGER={book}" in again.stdout.replace("\n", "")


@pytest.mark.slow
def test_an_interruption_and_the_end_of_the_budget_go_on(stage: Any, tmp_path: Path) -> None:
    out_of_time = run(tmp_path, "--budget", 0)
    assert out_of_time.exit_code == 3 and "out of time before: bench of adain_" in out_of_time.stdout
    assert stage.benched == [] and stage.spoken == []
    stage.breaks_at = 5
    interrupted = run(tmp_path)
    assert interrupted.exit_code == 2 and "repeat the command" in interrupted.stderr
    stage.breaks_at = None
    result = run(tmp_path, "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["gates"] != []
    assert len(stage.profiled) == 1 and len(stage.benched) == 2 and len(stage.spoken) == 5 + 2 * 8 - 4


def test_only_the_cases_that_are_asked_for(stage: Any, tmp_path: Path) -> None:
    result = run(tmp_path, "--json", "--case", "generator")
    names = [row["case"] for row in json.loads(result.stdout)["micro"]]
    assert result.exit_code == 3 and names and all("generator" in name for name in names)


def test_a_fusion_without_cases_is_not_benched_and_the_rule_says_why(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncased = msgspec.structs.replace(FUSIONS[KNOWN[0]], name="uncased")
    monkeypatch.setitem(FUSIONS, "uncased", uncased)
    monkeypatch.setattr(judge, "matched_fusions", lambda *_: Matches(("uncased",), "one"))
    result = run(tmp_path, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 3 and report["micro"] == [] and stage.benched == []
    assert "no case of uncased" in result.stderr
    [settled] = report["settled"]
    assert settled["accepted"] is False and "no record of uncased on kokoro" in settled["reason"]


def test_no_stack_is_loaded_once_the_time_is_up(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = ("decoder_graph", "text_graph")
    state = judge_state.State.open(tmp_path / "state", content())
    state.matched((*graphs, "sine_source"), "why")
    monkeypatch.setattr(bench_command, "judge_into", lambda *_: [judged("sine_source", WIN)])
    plan = micro.Bench(torch.device("cuda"), left=lambda: 0.0)
    called: list[tuple[str, ...]] = []

    def speak(names: tuple[str, ...], notify: Any) -> GateVerdict:
        called.append(names)
        return gate("pass")

    outcome = judge.run(state, ALL, plan, tmp_path / "book", speak)
    assert called == [] and outcome.unfinished == ("gate of decoder_graph, sine_source, text_graph",)
    outcome = judge.run(state, ALL, plan._replace(left=lambda: 9.0), tmp_path / "book", speak)
    assert called == [("decoder_graph", "sine_source", "text_graph")]
    assert [item.verdict for item in outcome.gates] == ["pass"] and outcome.unfinished == ()
    assert stage.benched == []  # graphs have no cases


def test_the_gate_stops_between_outputs_when_time_is_up() -> None:
    seconds = [2.0]
    said = []
    notify = judge._within(lambda: seconds[0], lambda *progress: said.append(progress))
    notify("speaking", 1, 8)
    seconds[0] = -1.0
    with pytest.raises(judge.OutOfTime):
        notify("speaking", 2, 8)
    notify("speaking", 8, 8)  # what is done is done
    assert len(said) == 3


def test_a_folder_that_none_may_write_is_refused_before_anything_runs(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    result = run(tmp_path)
    assert result.exit_code == 2 and "read-only" in " ".join(result.output.replace("│", " ").split())
    assert stage.profiled == []


def test_a_full_disk_ends_with_2_and_its_message(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(judge_state.State, "matched", full)
    result = run(tmp_path)
    assert result.exit_code == 2 and "voxfuse judge: [Errno 28] No space left on device" in result.stderr


def test_a_stack_that_nobody_can_speak_with_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = run(tmp_path, "--stack", "transformers")
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and "no driver for the stack 'transformers'" in said
    assert "voxfuse bench --stack transformers" in said and not (tmp_path / "state").exists()


def test_what_the_driver_never_runs_is_not_judged_and_said(stage: Any, tmp_path: Path) -> None:
    stage.fusions = KNOWN
    result = run(tmp_path, "--budget", 0)
    assert [known for _, _, known in stage.profiled] == [KNOWN]
    beyond = ", ".join(name for name in ALL if name not in KNOWN)
    assert f"the driver of kokoro does not run {beyond}: not judged" in result.stderr


def test_usage(stage: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").write_text("mine")
    for arguments, message in (
        (("--stack", "vocos"), "no fusions for 'vocos'; stacks with fusions: chatterbox, cosyvoice2,"),
        (("--device", "banana"), "expected cpu, cuda"),
        (("--case", "nosuch"), "on kokoro with 'nosuch' in its name"),
        (("--protocol", "lax"), "expected one of smoke, full"),
        (("--state", tmp_path / "file"), "is a file"),
        (("--ledger", tmp_path / "file"), "is a file"),
        (("--state", tmp_path / "others"), "holds files but no state.json"),
        (("--pairs", 29), "30"),
    ):
        result = run(tmp_path, *arguments)
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split()), arguments
    assert stage.benched == [] and not (tmp_path / "state").exists()


def content(**changes: Any) -> judge_state.Content:
    fields = {
        "stack": "kokoro",
        "stack_version": "0.9.4",
        "device": "cuda",
        "backend": "triton",
        "protocol_sha256": "0",
        "pairs": 50,
        "environment": measured().environment,
    }
    return judge_state.Content(**(fields | changes))


def changed(**changes: Any) -> Any:
    return msgspec.structs.replace(measured().environment, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack": "mimi"}, "stack is 'kokoro' there, 'mimi' here"),
        ({"stack_version": "0.9.5"}, "stack_version"),
        ({"pairs": 30}, "pairs is 50 there, 30 here"),
        ({"environment": changed(commit="f" * 40)}, "commit is None there"),
        ({"environment": changed(torch="2.14.0")}, "torch is '2.13.0' there, '2.14.0' here"),
        ({"environment": changed(triton="3.8.0")}, "triton is"),
        ({"environment": changed(gpu="NVIDIA B200")}, "gpu is"),
        ({"environment": changed(gpu_uuid_sha256="1")}, "gpu_uuid_sha256 is"),
    ],
)
def test_the_state_of_another_run_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    first = judge_state.State.open(tmp_path / "state", content())
    first.matched(KNOWN, "why")
    again = judge_state.State.open(tmp_path / "state", content())
    assert again.content.matched == KNOWN and again.content.note == "why"
    with pytest.raises(judge_state.StateMismatch, match=message):
        judge_state.State.open(tmp_path / "state", content(**changes))


def judged(fusion: str, made: MicroVerdict | None) -> micro.Judged:
    case = measured().case
    return micro.Judged(JudgedCase(fusion=fusion, case=case, calls=1), made)


WIN, LOSS = measured(), measured(8.0, 10.0)
WRONG = verdict(wrong="error", ratios=(), arms=())


def test_only_what_wins_is_gated() -> None:
    by = {"adain_snake": WIN, "adain_leaky_relu": LOSS}
    cases = [judged(name, item) for name, item in by.items()]
    assert gate_sets.worth_gating(KNOWN, cases, dry=False) == ("adain_snake",)
    assert gate_sets.worth_gating(KNOWN, cases, dry=True) == KNOWN
    cases = [judged("adain_snake", WRONG), judged("adain_leaky_relu", None)]
    assert gate_sets.worth_gating(KNOWN, cases, dry=False) == ()
    assert gate_sets.worth_gating(("adain_snake",), cases, dry=True) == ()


def of_kokoro() -> tuple[Patch, ...]:
    stack = registry.patches_of("kokoro")
    assert stack is not None
    return stack.patches


def patch(fusion: str, target: str, *absorbs: str, contract: str = "same-precision") -> Patch:
    record = msgspec.structs.replace(FUSIONS["adain_snake"], name=fusion, contract=contract)
    names = tuple(f"m:{name}.forward" for name in (target, *absorbs))
    return Patch(fusion=record, target=names[0], absorbs=names, build=lambda original, run: original)


def test_graphs_are_gated_though_nothing_benches_them_and_apart_from_what_they_absorb() -> None:
    graphs = {name for name in ALL if FUSIONS[name].graph}
    assert graphs == {"decoder_graph", "text_graph"}
    cases = [judged(name, WIN) for name in ALL if name not in graphs]
    worth = gate_sets.worth_gating(ALL, cases, dry=False)
    assert worth == ALL
    assert gate_sets.gate_sets(worth, of_kokoro(), "triton") == [
        ("decoder_graph", "sine_source", "text_graph"),
        ("adain_conv_block", "adain_leaky_relu", "istft_polar", "stft_polar"),
        ("adain_snake",),  # adain_conv_block serves its only target first
    ]
    assert gate_sets.gate_sets(worth, of_kokoro(), "reference")[0] == (  # graphs cannot be captured there
        *("adain_conv_block", "adain_leaky_relu", "istft_polar", "sine_source", "stft_polar"),
    )
    assert gate_sets.gate_sets(KNOWN, of_kokoro(), "triton") == [KNOWN]
    assert gate_sets.gate_sets((), of_kokoro(), "triton") == gate_sets.gate_sets(ALL, (), "triton") == []


def test_a_fusion_is_kept_from_running_where_every_target_of_it_is_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    both = (patch("inner", "Inner"), patch("inner", "Elsewhere"), patch("outer", "Outer", "Inner"))
    for item in both:
        monkeypatch.setitem(FUSIONS, item.fusion.name, item.fusion)
    assert not gate_sets.keeps_from_running("outer", "inner", both)  # it is called elsewhere
    assert gate_sets.gate_sets(("outer", "inner"), both, "triton") == [("inner", "outer")]
    one = (both[0], both[2])
    assert gate_sets.keeps_from_running("outer", "inner", one)
    assert not gate_sets.keeps_from_running("inner", "outer", one)
    assert gate_sets.gate_sets(("outer", "inner"), one, "triton") == [("inner",), ("outer",)]
    mutual = (patch("inner", "Inner", "Outer"), both[2])
    assert gate_sets.gate_sets(("outer", "inner"), mutual, "triton") == [("inner",), ("outer",)]


def test_reduced_precision_is_gated_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = tuple(patch(name, name.title(), contract="reduced") for name in ("r2", "r1"))
    for item in reduced:
        monkeypatch.setitem(FUSIONS, item.fusion.name, item.fusion)
    sets = gate_sets.gate_sets(("r2", *KNOWN[::-1], "r1"), (*of_kokoro(), *reduced), "triton")
    assert sets == [KNOWN, ("r1",), ("r2",)]


def gate(outcome: str) -> GateVerdict:
    gates = [entry.verdict for entry in ledger.load([ledger.SHIPPED]) if isinstance(entry.verdict, GateVerdict)]
    shipped = next(verdict for verdict in gates if verdict.fusions == ("adain_leaky_relu", "adain_snake"))
    return msgspec.structs.replace(shipped, verdict=outcome)


ON, OFF = judge.Settled("a", True, ""), judge.Settled("a", False, "")


@pytest.mark.parametrize(
    ("verdicts", "gates", "settled", "unfinished", "expected"),
    [
        ((WIN,), ("pass",), (ON, OFF), (), 0),
        ((LOSS,), (), (OFF,), (), 1),
        ((WRONG, WIN), ("pass",), (ON,), ("gate",), 1),
        ((WIN,), ("fail",), (OFF,), ("gate",), 1),
        ((WIN,), ("inconclusive",), (OFF,), (), 3),
        ((WIN,), (), (ON,), ("gate",), 3),
        ((), (), (), (), 3),
    ],
)
def test_exit_status(
    verdicts: tuple[MicroVerdict, ...],
    gates: tuple[str, ...],
    settled: tuple[judge.Settled, ...],
    unfinished: tuple[str, ...],
    expected: int,
) -> None:
    cases = tuple(judged("a", item) for item in verdicts)
    outcome = judge.Outcome("", cases, tuple(gate(name) for name in gates), settled, unfinished)
    assert judge.status(outcome, dry=False) == expected
    assert judge.status(outcome, dry=True) == (1 if (expected == 1 and "fail" in gates) or WRONG in verdicts else 3)


def test_the_profile_names_the_fusions(tmp_path: Path) -> None:
    path = tmp_path / "hotspots.json"
    hotspot = {"stack": "kokoro", "fusions": ["adain_snake", "of another stack"], "module": "x"}
    path.write_text(json.dumps({"record": "x", "processes": [{"hotspots": [hotspot, {"fusions": []}], "tree": {}}]}))
    found = hotspots.read_matches(path, "kokoro", KNOWN)
    assert found.fusions == ("adain_snake",)
    assert "1 of 2 fusions match" in found.note and "not judged: adain_leaky_relu" in found.note


@pytest.mark.parametrize("data", ["{", '{"processes": 3}', '{"processes": [{"hotspots": [{"fusions": [1]}]}]}', None])
def test_without_a_readable_profile_all_fusions_are_judged_and_it_says_so(data: str | None, tmp_path: Path) -> None:
    path = tmp_path / "hotspots.json"
    if data is not None:
        path.write_text(data)
    found = hotspots.read_matches(path, "kokoro", KNOWN)
    assert found.fusions == KNOWN and "so all fusions of kokoro are judged" in found.note


@pytest.mark.parametrize(
    ("code", "stderr", "note"),
    [
        (2, "No such command 'profile'.", "this version has no voxfuse profile, so all fusions"),
        (1, "went wrong\nbadly", r"ended with 1 \(badly\), so all fusions"),
    ],
)
def test_a_profile_that_fails_is_said(
    code: int, stderr: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = hotspots.subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(hotspots.subprocess, "run", lambda *_, **__: done)
    found = hotspots.matched_fusions("kokoro", "cpu", tmp_path, KNOWN, 10)
    assert found.fusions == KNOWN
    assert re.search(note, found.note)


def test_a_profile_that_was_cut_short_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, timeout: float, **__: Any) -> None:
        raise hotspots.subprocess.TimeoutExpired("voxfuse", timeout)

    monkeypatch.setattr(hotspots.subprocess, "run", slow)
    found = hotspots.matched_fusions("kokoro", "cpu", tmp_path, KNOWN, 10)
    assert found.fusions == KNOWN and found.again and "did not end within 10 s" in found.note


@pytest.mark.parametrize("data", ["", "{", "[]", '{"stack": 3}', '{"matched": ["x"]}'])
def test_a_state_that_cannot_be_read_is_refused(data: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(data)
    with pytest.raises(judge_state.StateMismatch, match="Choose another --state"):
        judge_state.State.open(tmp_path, content())


def test_a_state_with_fusions_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    judge_state.State.open(tmp_path, content()).matched(("adain_snake", "gone"), "why")
    with pytest.raises(judge_state.StateMismatch, match="names fusions that do not exist: gone"):
        judge_state.State.open(tmp_path, content())


@pytest.mark.parametrize("data", [b"", b"{", b'{"record": "gate-verdict"}'])
def test_a_gate_verdict_that_cannot_be_read_is_made_again(data: bytes, tmp_path: Path) -> None:
    state = judge_state.State.open(tmp_path / "state", content())
    state.gate_folder(KNOWN).mkdir()
    (state.gate_folder(KNOWN) / "verdict.json").write_bytes(data)
    state.gated(KNOWN, gate("pass"))
    assert state.verdict_of(KNOWN) is None


def test_a_gate_verdict_counts_only_once_it_is_done(tmp_path: Path) -> None:
    state = judge_state.State.open(tmp_path / "state", content())
    folder = state.gate_folder(KNOWN)
    folder.mkdir()
    (folder / "verdict.json").write_bytes(to_json(gate("pass")))
    assert state.verdict_of(KNOWN) is None
    state.gated(KNOWN, gate("pass"))
    again = judge_state.State.open(tmp_path / "state", content())
    assert again.verdict_of(KNOWN[::-1]) == gate("pass") and again.verdict_of(KNOWN[:1]) is None
