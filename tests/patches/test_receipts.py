"""Receipts as a table for people and as files for the summary of many processes."""

import json
import os
import subprocess
import sys

import msgspec
import pytest
import torch
from toystack import ToyStack

from voxfuse.patches import PatchWarning
from voxfuse.patches.engine import apply_patches
from voxfuse.records import Receipt


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_the_report_shows_what_was_never_called(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with apply(model) as patches, torch.no_grad():
        assert "never called" in patches.report()
        model(x)
        report = patches.report()
        assert "never called" not in report
        for text in ("toy_norm", "toyvoice", "applied", "reference"):
            assert text in report
    with apply(model, backend="interpreter") as patches:
        model(x)
        assert "2: an input needs a gradient" in " ".join(patches.report().split())


def test_the_repr_counts(toy: ToyStack) -> None:
    toy.use(*toy.all_patches)
    patches = apply("toyvoice", exclude=["toy_gain"])
    assert repr(patches) == "<PatchSet: 2 applied, 1 skipped>"
    patches.revert()
    assert repr(patches) == "<PatchSet: 2 reverted, 1 skipped>"


def test_receipt_files_are_written_at_apply_and_rewritten_at_exit(toy: ToyStack, tmp_path) -> None:
    """One file per process and set; the last state is that at exit."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, voxfuse\n"
        "patches = voxfuse.apply_patches('vocos', backend='reference')\n"
        "more = voxfuse.apply_patches('dac', backend='reference')\n"
        "from voxfuse.kernels._op import TALLIES\n"
        "patches._entries[0].keys = ('key',)\n"
        "TALLIES.add('key', calls=3)\n"
        "print(os.getpid(), len(os.listdir(os.environ['VOXFUSE_RECEIPTS'])))\n"
    )
    folder = tmp_path / "made" / "receipts"
    environment = {**os.environ, "VOXFUSE_RECEIPTS": str(folder)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    process, files = map(int, done.stdout.split())
    assert files == 2
    first, second = (folder / f"receipts-{process}-{number}.json" for number in (0, 1))
    (receipt,) = msgspec.json.decode(first.read_bytes(), type=list[Receipt])
    assert (receipt.stack, receipt.process_id, receipt.calls) == ("vocos", process, 3)
    assert json.loads(second.read_text())[0]["stack"] == "dac"
    assert sorted(path.name for path in folder.iterdir()) == [first.name, second.name]  # no partial file left


def test_a_folder_that_cannot_be_written_warns(toy: ToyStack, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VOXFUSE_RECEIPTS", str(tmp_path / "file"))
    monkeypatch.setattr("atexit.register", lambda function: None)
    with pytest.warns(PatchWarning, match="VOXFUSE_RECEIPTS: receipts not written"), apply("toyvoice") as patches:
        assert patches.receipts[0].status == "applied"
