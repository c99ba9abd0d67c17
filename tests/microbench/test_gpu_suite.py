"""The GPU suite's dry run: steps on a CPU, resuming, stopping in time, and the archives."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import tarfile

import gpu_sanitizer
import gpu_suite
import pytest
import torch
from gpu_suite_state import Row

from voxfuse import kernels
from voxfuse.evidence import ledger
from voxfuse.kernels._op import OPS
from voxfuse.microbench.cases import load_cases, stacks_with_cases
from voxfuse.recompute import recompute

needs_kokoro = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="needs the package kokoro")


def suite(out, *arguments):
    return gpu_suite.main(["--device", "cpu", "--out", str(out), "--pairs", "30", *arguments])


@pytest.mark.slow
def test_checks_and_micro_write_records_and_are_not_repeated(tmp_path, capsys):
    assert suite(tmp_path, "--only", "checks,micro", "--budget", "500") == 0
    table = capsys.readouterr().out
    assert "64 calls, 0 faults" in table
    verdicts = [entry.verdict for entry in ledger.load([tmp_path / "records"])]
    judged = {case.fusion for stack in stacks_with_cases() for case in load_cases(stack)}
    assert {verdict.fusion for verdict in verdicts} == judged
    assert all(recompute(verdict) == verdict for verdict in verdicts)
    assert suite(tmp_path, "--only", "checks,micro", "--budget", "0") == 0  # all of it is there
    assert [entry.verdict for entry in ledger.load([tmp_path / "records"])] == verdicts


@pytest.mark.slow
@needs_kokoro
def test_decoder_and_launches_of_the_real_decoder(tmp_path, capsys):
    assert suite(tmp_path, "--only", "decoder,launches", "--budget", "500") == 0
    table = capsys.readouterr().out
    assert (
        "graph identical, eager again identical" in table
    )  # no graph there; the source's reference is upstream's chain
    assert "'adain_conv_block': 520" in table


def test_the_sanitizer_watches_every_kernel_inside_its_envelope():
    seen = set()
    for op, arguments in gpu_sanitizer.calls(torch.device("cpu")):
        assert op.unsupported(*arguments) is None
        seen.add(op.name)
    modules = [module.name for module in pkgutil.iter_modules(kernels.__path__, "voxfuse.kernels.")]
    for name in modules:
        importlib.import_module(name)
    ours = {name for name, op in OPS.items() if op.launch.__module__.startswith("voxfuse.kernels.")}
    # for one GPU alone (their own test files have their calls); conv1d is cuDNN and what is watched already
    assert seen == ours - set(gpu_sanitizer.HOPPER) - {"conv1d"}


def test_kernels_under_the_sanitizer_are_chosen_by_pattern():
    names = [op.name for op, _ in gpu_sanitizer.matching(("skinny_*", "snake", "snake_conv_pair"))]
    assert set(names) == {"skinny_linear", "skinny_swiglu", "snake"}  # the pair needs a GPU of compute capability 9.0
    with pytest.raises(KeyError, match="no kernel matches 'snaek'"):
        gpu_sanitizer.matching(("snaek",))


def test_nothing_begins_after_the_budget(tmp_path, capsys):
    assert suite(tmp_path, "--only", ",".join(gpu_suite.STEPS), "--budget", "0") == 3
    table = capsys.readouterr().out.split('{"torch"')[1]
    for name in set(gpu_suite.STEPS) - {"sanitizer"}:  # on a CPU its calls are only counted
        assert re.search(rf"^\? {name} .*not reached within the budget", table, re.MULTILINE), name
    assert not (tmp_path / "records").exists()


def test_a_step_that_breaks_leaves_the_others_running(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gpu_suite.STEPS, "checks", gpu_suite.Step("no_such_module", "run", 10))
    assert suite(tmp_path, "--only", "checks,micro", "--budget", "0") == 1
    table = capsys.readouterr().out
    assert "broke: ModuleNotFoundError" in table and "not reached" in table


def test_unknown_steps_are_refused(tmp_path):
    with pytest.raises(SystemExit) as stop:
        suite(tmp_path, "--only", "checks,everything")
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        suite(tmp_path, "--only", "checks", "--seconds", "everything=3")
    assert stop.value.code == 2


def test_archives_are_bounded_ordered_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "PIECE_BYTES", 1000)
    out = tmp_path / "out"
    contents = {"gate/audio/a.flac": 600, "gate/audio/b.flac": 600, "records/x.json": 300, "steps/y.json": 300}
    for name, size in contents.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * (size // len(name) + 1))
    message = gpu_suite.pack(out, tmp_path / "first", first=0, count=2)
    assert "0 to 1 of 0 to 2" in message
    gpu_suite.pack(out, tmp_path / "rest", first=2, count=2)
    archives = sorted((tmp_path / "first").iterdir()) + sorted((tmp_path / "rest").iterdir())
    assert [path.name for path in archives] == ["suite-00.tar.gz", "suite-01.tar.gz", "suite-02.tar.gz"]
    seen = {}
    for path in archives:
        with tarfile.open(path) as archive:
            seen |= {member.name: archive.extractfile(member).read() for member in archive.getmembers()}
    assert seen == {name: (out / name).read_bytes() for name in contents}
    with tarfile.open(archives[0]) as archive:
        assert archive.getnames() == ["records/x.json", "steps/y.json"]


def test_rows_mark_what_needs_attention():
    assert str(Row("case", "text").of("micro")).startswith("  micro    case")
    assert str(Row("case", "text", "wrong").of("micro")).startswith("! micro")
    assert str(Row("case", "text", "missing").of("gate")).startswith("? gate")
