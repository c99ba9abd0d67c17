"""The command line: what it offers, its exit statuses, and that asking for help costs no torch."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result
from verdicts import measured

from voxfuse import doctor, records
from voxfuse.__main__ import app
from voxfuse._version import VERSION
from voxfuse.evidence import ledger

GATE_PACKAGES = ("faster_whisper", "soundfile", "jiwer", "whisper_normalizer", "transformers", "onnx", "kokoro")


def voxfuse(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def process(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m voxfuse`` in a process of its own; ``before`` runs first."""
    code = f"import sys\n{before}\nfrom voxfuse.__main__ import main\nsys.argv = ['voxfuse', *{arguments!r}]\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def verdict() -> records.MicroVerdict:
    case = records.Case(name="row[8]", stack="kokoro", tensors={})
    return msgspec.structs.replace(measured(20.0, 10.0, None), case=case)


def test_version() -> None:
    result = voxfuse("--version")
    assert (result.exit_code, result.stdout) == (0, f"voxfuse {VERSION}\n")
    assert importlib.metadata.version("voxfuse") == VERSION


def test_help_lists_the_commands_that_exist_and_no_others() -> None:
    result = voxfuse("--help")
    assert result.exit_code == 0
    listed = set(re.findall(r"^│ ([a-z]+) ", result.stdout, re.MULTILINE))
    assert listed == {"bench", "doctor", "gate", "hotspots", "judge", "ledger", "profile"}


def test_help_loads_neither_torch_nor_triton() -> None:
    done = process("--help", before="import atexit; atexit.register(lambda: print(*sorted(sys.modules)))")
    assert done.returncode == 0
    loaded = done.stdout.split()
    assert "voxfuse.__main__" in loaded
    assert not {"torch", "triton", "numpy", "voxfuse.patches", "voxfuse.e2e"} & set(loaded)


@pytest.mark.parametrize("arguments", [("nope",), ("doctor", "--nope"), ("ledger", "extra"), ("gate", "--nope")])
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert voxfuse(*arguments).exit_code == 2


def test_a_crash_is_no_verdict() -> None:
    done = process("ledger", before="import voxfuse.evidence.listing as l; l.rows = lambda *_: 1 / 0")
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("note", 0), ("problem", 2)])
def test_doctor_status_and_json(state: doctor.State, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = doctor.Diagnosis(findings=(doctor.Finding(subject="GPU", value="[x]", state=state),), receipts=())
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    as_json = voxfuse("doctor", "--json")
    assert as_json.exit_code == status
    assert msgspec.json.decode(as_json.stdout, type=doctor.Diagnosis) == diagnosis
    as_table = voxfuse("doctor")
    assert as_table.exit_code == status
    assert "[x]" in as_table.stdout


def test_ledger_as_table_and_json(tmp_path: Path) -> None:
    path = ledger.append(verdict(), tmp_path)
    [row] = json.loads(voxfuse("ledger", "--json", "--folder", str(tmp_path)).stdout)
    assert row == {
        "measured_at": "2026-11-01T10:00:00+00:00",
        "judge": "micro",
        "stack": "kokoro",
        "subject": "adain_snake",
        "case": "row[8]",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0",
        "outcome": "win 2.00× eager",
        "file": str(path),
    }
    table = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ledger", "--folder", str(tmp_path)])
    assert table.exit_code == 0
    for text in ("row[8]", "NVIDIA H200 (9.0)", "win 2.00× eager"):
        assert text in table.stdout


def test_an_empty_ledger_says_where_it_looked(tmp_path: Path) -> None:
    result = voxfuse("ledger", "--folder", str(tmp_path))
    assert result.exit_code == 0
    assert "no verdict yet" in result.stdout
    assert str(tmp_path) in result.stdout.replace("\n", "")
    assert json.loads(voxfuse("ledger", "--json", "--folder", str(tmp_path)).stdout) == []


def test_a_ledger_that_is_not_there_ends_with_2(tmp_path: Path) -> None:
    result = voxfuse("ledger", "--folder", str(tmp_path / "absent"))
    assert result.exit_code == 2
    assert "absent is not a folder" in result.stderr.replace("\n", "")


def test_gate_help_lists_its_options() -> None:
    done = process("gate", "--help", before=f"for name in {GATE_PACKAGES}: sys.modules[name] = None")
    assert done.returncode == 0, done.stderr
    assert "Usage: voxfuse gate" in done.stdout
    for option in ("--stack", "--device", "--protocol", "--sentences", "--out", "--json"):
        assert option in done.stdout


def test_gate_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    before = f"for name in {GATE_PACKAGES}: sys.modules[name] = None"
    done = process("gate", "--device", "cpu", "--out", str(tmp_path / "run"), before=before)
    assert done.returncode == 2
    assert "pip install 'voxfuse[gate]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_installed_command_is_this_one() -> None:
    [script] = [
        script for script in importlib.metadata.entry_points(group="console_scripts") if script.name == "voxfuse"
    ]
    assert script.value == "voxfuse.__main__:main"
    command = Path(sys.executable).with_name("voxfuse")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert done.stdout == f"voxfuse {VERSION}\n"


def test_hotspots_refuses_a_stack_that_no_fusion_is_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["hotspots", str(tmp_path / "trace.json"), "--stack", "nosuch"])
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and "no fusions for 'nosuch'; stacks with fusions: chatterbox, cosyvoice2," in said
