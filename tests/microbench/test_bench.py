"""``voxfuse bench``: which cases, what is resumed, what it prints, its status, pictures, peers, and ``--tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner
from verdicts import H200, measured, verdict

from voxfuse.__main__ import app
from voxfuse.commands import bench as command
from voxfuse.evidence import ledger
from voxfuse.kernels import _tuned
from voxfuse.kernels._op import Run
from voxfuse.kernels._tuned import options
from voxfuse.kernels.adain import OPERATION, adain_act, shape_class
from voxfuse.microbench import bench, peers, plots, tune
from voxfuse.microbench.cases import load_cases, stacks_with_cases
from voxfuse.microbench.ceilings import MATMULS, machine_ceilings, matmul_flop_per_s
from voxfuse.microbench.peers import Peer
from voxfuse.microbench.timer import HostClock
from voxfuse.records import MicroVerdict

CPU = torch.device("cpu")
KNOWN = {judged.fusion for stack in stacks_with_cases() for judged in load_cases(stack)}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_choosing_cases() -> None:
    assert {case.fusion for case in bench.choose()} >= KNOWN
    assert {case.fusion for case in bench.choose(["adain_snake"])} == {"adain_snake"}
    assert all("8 rows" in case.case.name for case in bench.choose(stack="kokoro", case="8 rows"))
    for arguments, message in (
        ((["nope"],), "no fusion named 'nope'; known:"),
        (((), "mimi"), "no micro cases for stack 'mimi'"),
        ((["adain_snake"], "kokoro", "9 rows"), "no case of adain_snake on kokoro with '9 rows'"),
    ):
        with pytest.raises(KeyError, match=message):
            bench.choose(*arguments)


@pytest.mark.slow
def test_a_dry_run_keeps_records_and_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--device", "cpu", "--pairs", 30, "--out", tmp_path, "--json")
    assert result.exit_code == 3, result.output
    rows = json.loads(result.stdout)
    assert {row["fusion"] for row in rows} == KNOWN and f"[{len(KNOWN)}/{len(KNOWN)}]" in result.stderr
    for row in rows:
        made = msgspec.convert(row["verdict"], MicroVerdict)
        assert {"launch_floor_us", "peak_copy_bytes_per_s", "copy_bytes_per_s"} < made.ceilings.keys()
        assert {f"peak_{name}_flop_per_s" for name in MATMULS} < made.ceilings.keys()
        assert {arm.name for arm in made.arms if arm.absent} == set(peers.LIBRARIES)
    written = [entry.verdict for entry in ledger.load([tmp_path])]
    assert len(written) == len(KNOWN)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("judged again")

    monkeypatch.setattr(bench, "judge", never)
    again = run("adain_snake", "--device", "cpu", "--pairs", 30, "--out", tmp_path)
    assert again.exit_code == 3 and "adain_snake" in again.stdout and "none of 4" in again.stdout
    assert "dry run" in again.stdout


@pytest.mark.parametrize("name", ["commit", "voxfuse", "torch", "triton", "gpu", "gpu_uuid_sha256"])
def test_a_verdict_of_other_code_is_not_reused(name: str) -> None:
    assert len(bench.reusable([measured()], H200, dry=False)) == 1
    assert bench.reusable([measured()], msgspec.structs.replace(H200, **{name: "another"}), dry=False) == {}


def test_a_wrong_or_unsound_verdict_is_judged_again() -> None:
    wrong = verdict(wrong="error", ratios=(), arms=())
    unsound = verdict(controls=measured().controls | {"sound": 0.0})
    assert bench.reusable([wrong, unsound], H200, dry=False) == {}
    assert len(bench.reusable([wrong, unsound], H200, dry=True)) == 1  # a dry run claims nothing


def test_the_budget_and_the_status() -> None:
    [case] = bench.tiny(bench.choose(["adain_snake"]))
    kept: list[MicroVerdict] = []
    plan = bench.Bench(CPU, 30, "reference", "eager", lambda: 0.0)
    [judged] = bench.run([case], plan, {}, kept.append, HostClock())
    assert judged.outcome == "missing" and kept == []
    there = {bench.key_of(case.fusion, case.case): measured()}
    [judged] = bench.run([case], plan, there, kept.append, HostClock())
    assert judged.verdict == measured() and judged.outcome == "judged" and kept == []
    outcomes = {
        "judged": judged,
        "missing": bench.Judged(case, None),
        "wrong": bench.Judged(case, verdict(wrong="error")),
        "unsound": bench.Judged(case, verdict(controls=measured().controls | {"sound": 0.0})),
    }
    assert {name: item.outcome for name, item in outcomes.items()} == {name: name for name in outcomes}
    statuses = {name: command.status([judged, item], dry=False) for name, item in outcomes.items()}
    assert statuses == {"judged": 0, "missing": 3, "wrong": 1, "unsound": 3}
    assert command.status([judged], dry=True) == 3
    loss = bench.Judged(case, measured(8.0, 10.0))
    assert command.status([loss], dry=False) == 0  # a loss is a verdict


def test_the_table_has_times_only_where_they_count(capsys: pytest.CaptureFixture[str]) -> None:
    [case] = bench.tiny(bench.choose(["adain_snake"]))
    absent = measured(20.0, 10.0, None)
    rows = [measured(), measured(8.0, 10.0), absent, verdict(wrong="error 2e-3 [x]"), None]
    console = Console(width=200)
    console.print(command.verdict_table([bench.Judged(case, row) for row in rows]))
    shown = capsys.readouterr().out
    for text in (
        "win 2.00× [",
        "loss 0.80× [",
        "absent: Unsupported: no",
        "WRONG, no speed: error 2e-3 [x]",
        "not reached",
    ):
        assert text in shown


def test_usage_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (("nope",), "no fusion named 'nope'"),
        (("--stack", "mimi"), "no micro cases for stack 'mimi'"),
        (("--device", "cuda"), "torch sees no GPU"),
        (("--device", "banana"), "expected cpu, cuda or cuda:N"),
        (("--pairs", 29), "30"),
        (("--out", tmp_path / "file"), "is a file"),
        (("--tune",), "tuned on a GPU"),
        (("--tune", "--stack", "kokoro"), "--tune does not use --stack"),
        (("--table", tmp_path / "t.json"), "bench without --tune does not use --table"),
    ):
        result = run(*arguments)
        shown = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and message in shown, (arguments, shown)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wrong = verdict(wrong="error", ratios=(), arms=())
    bounded = verdict(flop=10**9, ceilings=measured().ceilings | {"flop_per_s": 4e14})
    path = tmp_path / "new" / "bench.png"
    plots.draw([measured(), measured(8.0, 10.0), bounded, wrong], path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000
    plots.draw([wrong], path)
    with pytest.raises(ValueError, match="no verdict"):
        plots.draw([], path)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'voxfuse\[bench\]'"):
        plots.draw([measured()], tmp_path / "bench.png")


def test_a_peer_is_an_arm_or_says_why_not() -> None:
    def adapt(found: Any) -> Any:
        return lambda x: found(x) * 2

    made = peers.arms(
        [
            Peer("numpy", "numpy:square", adapt),
            Peer("liger-kernel", "liger_kernel:nothing", adapt),
            Peer("msgspec", "msgspec:not.there", adapt),
        ],
        "squaring",
    )
    assert made["numpy"](3.0) == 18.0  # type: ignore[operator]
    assert made["liger-kernel"] == "liger-kernel is not installed"
    assert "msgspec:not.there cannot be loaded: AttributeError" in str(made["msgspec"])
    assert made["flash-attn"] == "flash-attn (not installed): no squaring was found in it"
    assert made.keys() == {*peers.LIBRARIES, "numpy", "msgspec"}


def test_ceilings_of_a_run() -> None:
    found = machine_ceilings(HostClock(), CPU)
    assert found.keys() == {"launch_floor_us", "peak_copy_bytes_per_s"} | {f"peak_{n}_flop_per_s" for n in MATMULS}
    assert all(value > 0 for value in found.values())
    before = torch.backends.cuda.matmul.allow_tf32
    assert 1e7 < matmul_flop_per_s(HostClock(), "tf32", 64, CPU) < 1e13
    assert torch.backends.cuda.matmul.allow_tf32 == before


class OptionsClock:
    """Calls cost what the launch options in force at their preparation cost; ``costs`` by number of warps."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs, self.rng = costs, np.random.default_rng(1)
        self.prepared: list[int] = []

    def prepare(self, call: Any, sets: Any) -> Any:
        clock, warps = self, dict(options(OPERATION, shape_class(sets[0][0].shape[2]), CPU))["num_warps"]
        clock.prepared.append(warps)

        class Timed:
            outputs: tuple[Any, ...] = ()

            def start(self) -> None:
                pass

            def elapsed_us(self) -> float:
                return float(clock.costs.get(warps, 99.0) * np.exp(clock.rng.normal(0, 0.003)))

        return Timed()

    def backlog(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def delay(self, microseconds: float) -> Any:
        raise AssertionError("not asked for")


def tuned_class(costs: dict[int, float], name: str = "resident 512", **changes: Any) -> tune.Tuned:
    tunable = tune.TUNABLE[OPERATION]._replace(**changes)
    make = tunable.classes[name]
    clock = OptionsClock(costs)
    return tune.tune_class(OPERATION, tunable, name, make, clock, CPU, Run("reference", "tune"), H200, 30)


def test_tuning_takes_what_is_clearly_faster_and_leaves_the_table_as_it_was() -> None:
    before = _tuned.read()
    tuned = tuned_class({1: 10.0, 2: 8.0, 4: 9.0})
    assert tuned.row is not None and tuned.row.options == {"num_warps": 2}
    assert tuned.row.key == (OPERATION, "resident 512", "*") and tuned.row.measured["gpu"] == "NVIDIA H200"
    assert tuned.row.measured["us"] == pytest.approx(8, rel=0.01)
    assert tuned.row.measured["us_before"] == pytest.approx(10, rel=0.01)
    assert tuned_class({1: 10.0, 2: 9.8, 4: 9.9}).row is None  # within the bar: noise does not rewrite the table
    assert tuned_class({1: 10.0, 2: 30.0, 4: 30.0}).row is None
    assert _tuned.read() == before and dict(options(OPERATION, "resident 512", CPU)) == {"num_warps": 1}


def test_a_wrong_candidate_is_never_timed() -> None:
    class Broken:
        reference = staticmethod(adain_act.reference)

        def __call__(self, *inputs: Any, run: Run) -> torch.Tensor:
            warps = dict(options(OPERATION, "resident 512", CPU))["num_warps"]
            if warps >= 4:
                raise RuntimeError("out of resources")
            return adain_act.reference(*inputs) * (1.001 if warps == 2 else 1.0)

    tuned = tuned_class({1: 10.0}, op=Broken())
    assert tuned.row is None and tuned.microseconds.keys() == {tune.INCUMBENT}
    assert "relative RMS error" in tuned.refused["num_warps=2"] and "out of resources" in tuned.refused["num_warps=4"]


def test_every_class_has_a_shape_in_it_and_candidates_the_table_allows() -> None:
    for operation, tunable in tune.TUNABLE.items():
        assert {row.shape_class for row in _tuned.read().values() if row.operation == operation} == set(tunable.classes)
        for name in tunable.classes:
            candidates = tunable.candidates(name)
            assert len(candidates) >= 2
            assert {key for candidate in candidates for key in candidate} <= {
                *_tuned.PORTABLE_OPTIONS,
                *_tuned.BLOCK_OPTIONS,
                "maxnreg",
            }
    shapes = {name: shape[2] for name, shape in tune._ADAIN_SHAPES.items()}
    assert {name: shape_class(frames) for name, frames in shapes.items()} == {name: name for name in shapes}
    assert tune.operations_of(("adain_snake",)) == [OPERATION] and tune.operations_of(()) == [*tune.TUNABLE]
    with pytest.raises(KeyError, match="nothing to tune for other; fusions with an entry in TUNABLE: adain_leaky_relu"):
        tune.operations_of(("other",))


def test_a_graph_has_no_cases_and_the_message_says_who_judges_it() -> None:
    with pytest.raises(KeyError, match=r"decoder_graph: graphs save the host's time: voxfuse gate judges them"):
        bench.choose(("decoder_graph",), "kokoro")


@pytest.mark.parametrize(
    ("error", "message"), [(OSError(28, "No space left"), "No space left"), (KeyboardInterrupt(), "repeat the command")]
)
def test_what_stops_a_bench_ends_with_2(
    error: BaseException, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise error

    monkeypatch.setattr(command, "judge_into", stop)
    result = CliRunner().invoke(app, ["bench", "adain_snake", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2 and message in result.stderr
