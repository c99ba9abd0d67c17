"""``voxfuse ledger`` and its subcommands: what they print, and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner
from verdicts import H200, measured, verdict

from voxfuse import records
from voxfuse.__main__ import app
from voxfuse.commands import ledger as command
from voxfuse.evidence import ledger

LOSS = verdict(eager_us=8.0, voxfuse_us=10.0, measured_at="2026-11-02T10:00:00Z")


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "240"}).invoke(app, ["ledger", *map(str, arguments)])


def words(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A folder with a win and a later loss of adain_snake."""
    folder = tmp_path / "book"
    ledger.append(measured(), folder)
    ledger.append(LOSS, folder)
    return folder


def test_listing_is_filtered(book: Path) -> None:
    assert len(json.loads(run("--folder", book, "--json").stdout)) == 2
    [row] = json.loads(run("--folder", book, "--json", "--verdict", "loss", "--fusion", "adain_snake").stdout)
    assert row["outcome"].startswith("loss 0.80× eager")
    assert json.loads(run("--folder", book, "--json", "--gpu", "b200").stdout) == []
    nothing = run("--folder", book, "--stack", "mimi")
    assert nothing.exit_code == 0 and "No verdict matches." in nothing.stdout


def test_why(book: Path) -> None:
    shown = run("why", "adain_snake", "--gpu", "H200", "--folder", book)
    assert shown.exit_code == 0 and "compute capability 9.0: off" in shown.stdout
    assert "lost to eager on case large" in shown.stdout and "to settle it on this GPU: voxfuse judge" in shown.stdout
    [found] = json.loads(run("why", "adain_snake", "--gpu", "9.0", "--folder", book, "--json").stdout)
    assert found["acceptance"]["accepted"] is False and found["stack"] == "kokoro"
    assert [ground[3] for ground in found["grounds"]] == ["loss"]  # the newest of the case
    shipped = run("why", "adain_snake", "--gpu", "9.0")
    assert "9.0: on" in shipped.stdout and "gate passed (full" in shipped.stdout
    assert "voxfuse.capturing()" not in shipped.stdout
    assert "warm up inside voxfuse.capturing()" in words(run("why", "text_graph", "--gpu", "H200"))


def test_why_on_this_machine(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "compute_capability", lambda: None)
    assert "a CPU: off" in run("why", "adain_snake", "--folder", book).stdout
    accepted_elsewhere = words(run("why", "text_graph"))
    assert "a CPU: off no GPU here" in accepted_elsewhere and "accepted on 9.0" in accepted_elsewhere
    assert "this GPU" not in accepted_elsewhere
    monkeypatch.setattr(command, "compute_capability", lambda: "8.9")
    assert "no record of adain_snake on kokoro for compute capability 8.9" in words(
        run("why", "adain_snake", "--folder", book)
    )


def test_recompute_finds_what_does_not_follow(book: Path, tmp_path: Path) -> None:
    honest = run("recompute", "--folder", book, "--json")
    assert honest.exit_code == 0 and [row["state"] for row in json.loads(honest.stdout)] == ["same", "same"]
    forged = msgspec.structs.replace(LOSS, ratios=measured().ratios)
    nearly = measured().ratios[0]
    nearly = msgspec.structs.replace(nearly, low=nearly.low * 1.0001)
    shifted = msgspec.structs.replace(measured(), ratios=(nearly, *measured().ratios[1:]))
    for name, record in (("forged", forged), ("shifted", shifted)):
        records.write(record, tmp_path / f"{name}.json")
    (tmp_path / "torn.json").write_text("{")
    result = run("recompute", *(tmp_path / f"{name}.json" for name in ("forged", "shifted", "torn", "none")), "--json")
    assert result.exit_code == 1
    rows = [(row["state"], row["detail"]) for row in json.loads(result.stdout)]
    assert [state for state, _ in rows] == ["differs", "differs", "unreadable", "unreadable"]
    assert "ratio to eager: 2" in rows[0][1] or "ratio to eager: 1.99" in rows[0][1]
    assert rows[1][1] == "an interval differs from the bootstrap of its samples"


def test_the_shipped_ledger_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("recompute", "--json")
    states = [row["state"] for row in json.loads(result.stdout)]
    assert result.exit_code == 0 and set(states) == {"same", "gate"} and states.count("same") >= 20


def test_stale(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "capture_environment", lambda: H200)
    assert run("stale", "--gpu", "9.0", "--folder", book).exit_code == 0
    monkeypatch.setattr(command, "capture_environment", lambda: msgspec.structs.replace(H200, torch="2.14.0"))
    result = run("stale", "--gpu", "9.0", "--folder", book, "--json")
    assert result.exit_code == 1
    [row] = json.loads(result.stdout)
    assert row == {
        "subject": "adain_snake",
        "case": "large",
        "gpu": "NVIDIA H200",
        "changes": "torch 2.13.0 then, 2.14.0 now",
    }


def test_render_and_check(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    assert run("render", "--check", "--out", root / "EVIDENCE.md").exit_code == 0
    elsewhere = run("render", "--out", tmp_path / "EVIDENCE.md")
    assert elsewhere.exit_code == 2 and "run this in a checkout's root" in words(elsewhere)


def test_render_writes_what_check_then_finds_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path / "records")
    ledger.append(LOSS, tmp_path / "records")
    page = tmp_path / "EVIDENCE.md"
    assert run("render", "--check", "--out", page).exit_code == 1 and not page.exists()
    assert (
        run("render", "--out", page).exit_code == 0 and "0 wins, 0 neutral, 1 losses against eager" in page.read_text()
    )
    assert run("render", "--check", "--out", page).exit_code == 0
    ledger.append(measured(), tmp_path / "records")
    stale = run("render", "--check", "--out", page)
    assert stale.exit_code == 1 and "is not current: voxfuse ledger render" in words(stale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("why", "nope"), "no fusion named 'nope'"),
        (("--fusion", "nope"), "no fusion named 'nope'"),
        (("why", "adain_snake", "--stack", "mimi"), "adain_snake patches kokoro, not mimi"),
        (("why", "adain_snake", "--gpu", "tpu"), "no GPU on file has 'tpu' in its name; on file: NVIDIA H200"),
        (("--json", "why", "adain_snake"), "options go after 'why'"),
        (("--verdict", "best"), "best"),
        (("recompute", "--folder", "/nowhere"), "/nowhere is not a folder"),
        (("nothing",), "No such command"),
    ],
)
def test_usage_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in words(result)


def test_a_name_that_several_gpus_share_asks_for_the_capability(book: Path) -> None:
    ada = msgspec.structs.replace(H200, gpu="NVIDIA L40S", compute_capability="8.9")
    ledger.append(verdict(environment=ada), book)
    result = run("why", "adain_snake", "--gpu", "nvidia", "--folder", book)
    assert result.exit_code == 2 and "GPUs of several compute capabilities have 'nvidia'" in words(result)
