"""Public faults of import order, stale bindings and spawned processes."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kokoro_parts import speak_in_child
from toystack import ToyStack

from voxfuse.patches.engine import apply_patches
from voxfuse.records import Receipt

IMPORT_ORDERS = {
    "stack first": "import kokoro_parts; kokoro_parts.istftnet(); import voxfuse",
    "voxfuse first": "import voxfuse; import kokoro_parts; kokoro_parts.istftnet()",
    "stack not imported": "import voxfuse, kokoro_parts",
}
APPLY_AND_RUN = """
import torch
patches = voxfuse.apply_patches("kokoro", policy="all", backend="reference")
build, inputs = kokoro_parts.MODEL_PARTS["AdaINResBlock1"]
with torch.no_grad():
    build().eval()(*inputs())
(receipt,) = [receipt for receipt in patches.receipts if receipt.calls]
print(receipt.status, receipt.calls)
"""


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


@pytest.mark.slow
@pytest.mark.parametrize("order", IMPORT_ORDERS)
def test_either_may_be_imported_first(order: str) -> None:
    """unsloth #1831, #2233: the patching library had to be imported before its target."""
    program = f"import sys; sys.path.insert(0, sys.argv[1])\n{IMPORT_ORDERS[order]}\n{APPLY_AND_RUN}"
    command = [sys.executable, "-W", "ignore", "-c", program, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    status, calls = done.stdout.split()[-2:]
    assert status == "applied"
    assert int(calls) > 0


@pytest.mark.parametrize("imported", ["before", "after"])
def test_stale_copies_of_a_patched_function(toy: ToyStack, imported: str) -> None:
    """sglang #21388: ``from rotary_embedding import get_rope`` elsewhere kept the unpatched function."""
    calls = []

    def counting(original, run):
        return lambda x, factor: calls.append(run.receipt) or original(x, factor)

    toy.use(toy.patch("toy_gain", toy.gain_target, counting))
    if imported == "before":
        toy.module("user")
    with apply("toyvoice"):
        assert toy.module("user").speak(torch.ones(1)).item() == 3.0  # it calls its copy, ``louder``
        assert len(calls) == 1
    toy.module("user").speak(torch.ones(1))
    assert len(calls) == 1
    assert toy.module("user").louder is toy.layers.gain


@pytest.mark.slow
def test_a_spawned_child_reports_its_own_receipt() -> None:
    """sglang #38464, #36319: hooks of the parent did not exist in spawned workers, and nobody could see it."""
    with apply("kokoro") as patches:
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        child = context.Process(target=speak_in_child, args=(answers,))
        child.start()
        receipts: list[Receipt] = answers.get(timeout=300)
        child.join(60)
        assert child.exitcode == 0
        own = [receipt for receipt in patches.receipts if receipt.fusion == "adain_snake"]
        assert {receipt.process_id for receipt in receipts} == {child.pid}
        assert {receipt.process_id for receipt in own}.isdisjoint({child.pid})
        assert all(receipt.status == "applied" for receipt in receipts)
        assert sum(receipt.calls for receipt in receipts) > 0
        assert sum(receipt.calls for receipt in own) == 0  # the parent's count is its own
