"""Planted records: whatever a file of the ledger holds, the commands and the default answer and do not crash."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from verdicts import gate, measured

from voxfuse.__main__ import app
from voxfuse.evidence import acceptance, ledger
from voxfuse.fusions.registry import FUSIONS
from voxfuse.records import to_json

NAMES = ("adain_snake", "adain_leaky_relu", "decoder_graph")


def micro(**changes: Any) -> bytes:
    return json.dumps(json.loads(to_json(measured())) | changes).encode()


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(to_json(measured()))
    change(content)
    return json.dumps(content).encode()


def of_gate(**changes: Any) -> bytes:
    return json.dumps(json.loads(to_json(gate())) | changes).encode()


BLOCK = {"index": 0, "first": "baseline", "baseline_wall_s": [1.0], "patched_wall_s": [], "baseline_audio_s": [1.0]}
BLOCKS = [BLOCK | {"kind": kind, "patched_audio_s": [1.0]} for kind in ("a/b", "without:decoder_graph")]
REFUSED = {
    "ratio": edited(lambda o: o["ratios"][0].update(median=99.0)),
    "verdict": edited(lambda o: o["ratios"][0].update(verdict="loss")),
    "no controls": micro(controls={}),
    "no ceilings": micro(ceilings={}),
    "no bandwidth": micro(ceilings={"copy_bytes_per_s": 0, "launch_floor_us": 1.0}),
    "no time": edited(lambda o: [arm.update(gpu_us=[0.0] * len(arm["gpu_us"])) for arm in o["arms"]]),
    "short": edited(lambda o: o["arms"][0].update(gpu_us=o["arms"][0]["gpu_us"][:3])),
    "wrong and fast": micro(wrong="error"),
    "many bytes": micro(bytes_moved=10**18),
    "more bytes than 64 bits": micro(bytes_moved=10**30),
    "another schema": micro(schema=99),
    "no time of measurement": micro(measured_at="yesterday"),
    "before year 1": micro(measured_at="0001-01-01T00:00:00+23:00"),
    "cut short": micro()[:-100],
    "no object": b"[]",
    "deep": b"[" * 100_000,
    "half a character": b'{"record":"micro-verdict","fusion":"\\ud800"}',
    "empty": b"",
}
READ = {
    "twice the same arm's name": edited(lambda o: o["arms"].append(o["arms"][-1])),
    "escape sequences": micro(fusion="../../etc/[red]\x1b[31m"),
    "gate with escape sequences": of_gate(reasons=["a|b\nc [red]\x1b]0;x\x07"], stack="x[/]", verdict="fail"),
    "blocks without time": of_gate(fusions=["decoder_graph", "other"], blocks=BLOCKS),
    "no fusions": of_gate(fusions=[]),
    "no version": of_gate(stack_version=""),
}


@pytest.mark.parametrize("name", [*REFUSED, *READ])
def test_a_planted_record_crashes_nothing_and_turns_nothing_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.json").write_bytes((REFUSED | READ)[name])
    monkeypatch.setattr(ledger, "SHIPPED", tmp_path / "nothing shipped")
    monkeypatch.setenv("VOXFUSE_LEDGER", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ledger.LedgerWarning)
        entries = ledger.load()
        assert not (entries and name in REFUSED)
        for fusion in NAMES:
            assert not acceptance.accepted(FUSIONS[fusion], "kokoro", "0.9.4", "9.0", entries).accepted
        commands = [["ledger"], ["ledger", "recompute"], ["ledger", "stale", "--gpu", "9.0"]]
        commands += [["ledger", "why", fusion, "--gpu", "9.0"] for fusion in NAMES]
        for command in commands:
            for option in ([], ["--json"]):
                result = CliRunner().invoke(app, [*command, *option])
                assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
                assert result.exit_code in (0, 1)
                if option:
                    json.loads(result.stdout)
                else:
                    assert "\x1b" not in result.stdout and "\x07" not in result.stdout
    if name in REFUSED:
        assert CliRunner().invoke(app, ["ledger", "recompute"]).exit_code == 1
