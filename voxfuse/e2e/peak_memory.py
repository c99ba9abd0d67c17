"""Peak GPU memory of one arm in a process of its own: ``python -m voxfuse.e2e.peak_memory RUN_DIRECTORY ARM``."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path

import torch

from voxfuse.e2e.protocol import seed_of
from voxfuse.e2e.rundir import ARMS, ArmName, PeakMemory, RunDirectory
from voxfuse.fusions.graph_runner import capturing

TIMEOUT_S = 600


class MeasurementFailed(RuntimeError):
    """The process that measures memory failed; the message ends with its error output."""


def measure_peak_memory(run: RunDirectory, model_dir: Path | None) -> None:
    """Measure the arms that are not yet measured, each in a new process, into the run directory.

    Raises MeasurementFailed.
    """
    for arm in ARMS:
        if arm in run.peak_memory():
            continue
        command = [sys.executable, "-m", "voxfuse.e2e.peak_memory", str(run.path), arm]
        if model_dir is not None:
            command += ["--model-dir", str(model_dir)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise MeasurementFailed(f"peak memory of the {arm} arm: no result within {TIMEOUT_S} s") from error
        if done.returncode != 0:
            raise MeasurementFailed(f"peak memory of the {arm} arm: {done.stderr.strip()[-2000:]}")


def measure(run: RunDirectory, arm: ArmName, model_dir: Path | None) -> int:
    """Speak the longest texts in this process, weights loaded before, and give the peak of allocated bytes.

    Graphs are captured on the way. What their memory pools hold without a tensor in it counts as well, as it was before
    each text; so a text that captures into such memory counts that part twice.
    """
    from voxfuse import apply_patches
    from voxfuse.e2e.stacks import driver

    header = run.header
    stack = driver(header.stack)
    stack.load(header.device, model_dir)
    longest = sorted(run.texts, key=lambda text: len(text.text), reverse=True)
    with contextlib.ExitStack() as context:
        if arm == "patched":
            context.enter_context(
                apply_patches(
                    header.stack, include=list(header.fusions), policy="all", backend=header.backend, strict=True
                )
            )
        peak = 0
        with capturing():
            for text in longest[: run.protocol.throughput.memory_sentences]:
                held = _held_by_graphs()
                torch.cuda.reset_peak_memory_stats()
                stack.synthesize(text, seed_of(run.protocol, text.id, 0))
                peak = max(peak, held + torch.cuda.max_memory_allocated())
        return max(peak, _held_by_graphs() + torch.cuda.memory_allocated())


def _held_by_graphs() -> int:
    """Bytes of the memory pools of graphs that no tensor occupies: between replays nobody else can have them."""
    segments = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in segments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--model-dir", type=Path)
    options = parser.parse_args()
    directory = RunDirectory.open(options.run)
    peak = measure(directory, options.arm, options.model_dir)
    directory.append("memory.jsonl", [PeakMemory(arm=options.arm, peak_bytes=peak)])
