"""The ledger: what it writes and refuses to write, and what becomes of a bad file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from verdicts import FUSION, HOPPER, environment, gate, micro

from voxfuse import records
from voxfuse.evidence import acceptance, ledger
from voxfuse.recompute import recompute


def test_append_names_the_file_and_never_overwrites(tmp_path: Path) -> None:
    path = ledger.append(micro(), tmp_path)
    assert path == tmp_path / "nvidia-h200" / "micro-verdict-adain_snake-large-20261101T100000.json"
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="never overwritten"):
        ledger.append(micro(), tmp_path)
    others = [ledger.append(micro(outcome), tmp_path) for outcome in ("loss", "neutral")]  # of the same second
    assert [other.name for other in others] == [path.name.replace(".json", f"-{number}.json") for number in (2, 3)]
    with pytest.raises(FileExistsError, match=others[0].name):
        ledger.append(micro("loss"), tmp_path)
    whole = gate(guards=(records.Guard(name="new NaN", value=0, limit=0, outcome="pass"),))  # 0 is read back as 0.0
    kept = ledger.append(whole, tmp_path / "gates")
    with pytest.raises(FileExistsError, match="never overwritten"):
        ledger.append(ledger.read(kept), tmp_path / "gates")
    kept.unlink()
    assert path.read_bytes() == before and len(ledger.load([tmp_path])) == 3
    on_cpu = gate(environment=environment(None, None), protocol="../smoke test")
    assert ledger.append(on_cpu, tmp_path) == tmp_path / "cpu" / "gate-verdict-kokoro-smoke-test-20261101T120000.json"


def test_append_refuses_what_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not Fusion"):
        ledger.append(FUSION, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not an ISO 8601 time: 'today'"):
        ledger.append(micro(measured_at="today"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    code = """if True:
        import sys, time, msgspec
        from pathlib import Path
        from verdicts import micro
        from voxfuse.evidence import ledger
        host, book, at = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
        made = [micro(name=f"case {index}") for index in range(20)]
        made = [msgspec.structs.replace(item, environment=msgspec.structs.replace(item.environment, driver=host))
                for item in made]
        time.sleep(max(0.0, at - time.time()))
        for item in made:
            ledger.append(item, book)
    """
    at = str(time.time() + 4)
    command = [sys.executable, "-c", code]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen([*command, host, str(tmp_path), at], env=environ) for host in ("one", "two", "three")]
    assert [process.wait(timeout=100) for process in running] == [0, 0, 0]
    entries = ledger.load([tmp_path])
    assert len(entries) == 60 and len({(e.verdict.environment.driver, ledger.case(e.verdict)) for e in entries}) == 60
    assert list(tmp_path.rglob("*.part")) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(KeyboardInterrupt):
            ledger.append(micro(), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert ledger.append(micro(), tmp_path).is_file()


@pytest.mark.parametrize("time_then", ["0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:00"])
def test_a_time_that_utc_cannot_hold_is_a_bad_file_and_not_a_crash(time_then: str, tmp_path: Path) -> None:
    ledger.append(micro(), tmp_path)
    (tmp_path / "planted.json").write_bytes(records.to_json(micro(measured_at=time_then)))
    with pytest.warns(ledger.LedgerWarning, match="planted.json.*not an ISO 8601 time"):
        assert len(ledger.load([tmp_path])) == 1


def test_appended_verdicts_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("VOXFUSE_LEDGER", str(tmp_path / "mine"))
    ledger.append(micro(day=1), tmp_path / "shipped")
    ledger.append(gate(day=2), tmp_path / "mine")
    assert [entry.verdict for entry in ledger.load()] == [micro(day=1), gate(day=2)]
    assert acceptance.accepted(FUSION, "kokoro", "0.9.4", HOPPER).accepted
    ledger.append(micro("loss", day=3), tmp_path / "mine")
    assert not acceptance.accepted(FUSION, "kokoro", "0.9.4", HOPPER).accepted


def test_a_rewritten_file_is_read_anew(tmp_path: Path) -> None:
    path = ledger.append(micro(), tmp_path)
    assert len(ledger.load([tmp_path])) == 1
    wrong = json.loads(records.to_json(recompute(msgspec.structs.replace(micro(), wrong="error"))))
    path.write_text(json.dumps(wrong))
    assert ledger.load([tmp_path])[0].verdict.wrong == "error"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{" + b'"a":{' * 100_000,
        records.to_json(FUSION),
        records.to_json(micro()).replace(b'"schema": 1', b'"schema": 99'),
        records.to_json(micro(measured_at="today")),
    ],
)
def test_a_bad_file_is_named_and_skipped(content: bytes, tmp_path: Path) -> None:
    ledger.append(micro(), tmp_path)
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.warns(ledger.LedgerWarning, match=r"skipped a record of the ledger: .*bad\.json"):
        entries = ledger.load([tmp_path])
    assert [entry.verdict for entry in entries] == [micro()]


def boasting() -> records.MicroVerdict:
    ratios = tuple(msgspec.structs.replace(ratio, median=9.0) for ratio in micro().ratios)
    return micro(ratios=ratios)


def test_a_record_that_does_not_follow_from_its_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adain_snake does not follow from its samples: ratio to eager: 9 claimed"):
        ledger.append(boasting(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    records.write(boasting(), tmp_path / "mine.json")
    with pytest.warns(ledger.LedgerWarning, match=r"mine\.json: it does not follow .*: ratio to eager: 9 claimed"):
        assert ledger.load([tmp_path]) == []
    assert ledger.read(tmp_path / "mine.json") == boasting()


def test_an_older_honest_record_counts_where_a_newer_one_boasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path)
    ledger.append(micro("loss", day=1), tmp_path)
    ledger.append(gate(), tmp_path)
    forged = msgspec.structs.replace(micro("loss", day=2), ratios=micro("win").ratios)
    records.write(forged, tmp_path / "forged.json")
    with pytest.warns(ledger.LedgerWarning, match="forged"):
        found = acceptance.accepted(FUSION, "kokoro", "0.9.4", HOPPER)
    assert not found.accepted and "lost to eager" in found.reason


def test_a_file_too_large_for_a_verdict_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.append(micro(), tmp_path)
    monkeypatch.setattr(ledger, "MAX_BYTES", 10)
    with pytest.warns(ledger.LedgerWarning, match="more than the 10"):
        assert ledger.load([tmp_path]) == []


def test_a_missing_user_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE_LEDGER", str(tmp_path / "absent"))
    with pytest.warns(ledger.LedgerWarning, match="absent does not exist: make it, or unset VOXFUSE_LEDGER"):
        ledger.load()


def test_every_shipped_record_reads() -> None:
    files = list(ledger.SHIPPED.rglob("*.json"))
    assert len(ledger.load([ledger.SHIPPED])) == len(files)
