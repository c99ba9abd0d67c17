"""Step ``micro``: one MicroVerdict per committed case."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from gpu_suite_state import NOT_REACHED, Row, Suite

from voxfuse.evidence import ledger
from voxfuse.microbench.arms import contest
from voxfuse.microbench.cases import JudgedCase, load_cases, stacks_with_cases
from voxfuse.microbench.ceilings import PEAK_FOOTPRINT_BYTES, copy_bytes_per_s, launch_floor_us
from voxfuse.microbench.judge import judge
from voxfuse.microbench.timer import clock_for
from voxfuse.profiles.environment import capture_environment
from voxfuse.records import Case, MicroVerdict, TensorSignature

FIRST_CASE_S = 30.0  # until one has been timed: compiling and warming up
DRY_FRAMES = 40


def run(suite: Suite) -> Iterator[Row]:
    """One row per case. A case is judged again where the verdict in OUT is wrong or its controls were unsound."""
    cases = [case for stack in stacks_with_cases() for case in load_cases(stack)]
    if suite.dry:
        first_of_each = {case.fusion: case for case in reversed(cases)}
        cases = [msgspec.structs.replace(case, case=_tiny(case.case)) for case in first_of_each.values()]
    folder = suite.out / "records"
    there = {
        (entry.verdict.fusion, entry.verdict.case.name): entry.verdict
        for entry in ledger.load([folder] if folder.exists() else [])
        if isinstance(entry.verdict, MicroVerdict) and (suite.dry or entry.verdict.controls.get("sound") == 1.0)
    }
    machine: dict[str, float] = {}
    clock = clock_for(suite.device)
    environment = capture_environment(("numpy", "kokoro"))
    expected_s = FIRST_CASE_S
    for judged in cases:
        verdict = there.get((judged.fusion, judged.case.name))
        if verdict is None:
            if suite.left() < expected_s:
                yield Row(judged.case.name, NOT_REACHED, "missing")
                continue
            begin = time.monotonic()
            if not machine:
                footprint = 1 << 20 if suite.dry else PEAK_FOOTPRINT_BYTES
                machine = {
                    "launch_floor_us": launch_floor_us(clock, suite.device),
                    "peak_copy_bytes_per_s": copy_bytes_per_s(clock, footprint, suite.device),
                }
            verdict = _judge(suite, judged, clock, environment, machine)
            ledger.append(verdict, folder)
            expected_s = max(time.monotonic() - begin, 0.7 * expected_s)
            if suite.device.type == "cuda":
                torch.cuda.empty_cache()
        yield _row(judged, verdict, suite.dry)


def _judge(suite, judged, clock, environment, machine) -> MicroVerdict:  # type: ignore[no-untyped-def]
    made = contest(
        judged.fusion,
        judged.case,
        suite.device,
        clock,
        suite.run,
        machine,
        compile_backend="eager" if suite.dry else "inductor",
    )
    return judge(made, clock, environment, pairs=suite.pairs)


def _tiny(case: Case) -> Case:
    """The same case with a few frames, for the dry run; decode cases are small as they are."""
    if "style" not in case.tensors:
        return case
    rows, channels, _ = case.tensors["x"].shape
    shape, strides = (rows, channels, DRY_FRAMES), (channels * DRY_FRAMES, DRY_FRAMES, 1)
    x = TensorSignature(shape=shape, dtype="float32", strides=strides)
    return msgspec.structs.replace(case, name=f"dry run, {case.name}", tensors={**case.tensors, "x": x})


def _row(judged: JudgedCase, verdict: MicroVerdict, dry: bool) -> Row:
    if verdict.wrong is not None:
        return Row(judged.case.name, f"wrong: {verdict.wrong}", "wrong")
    arms = {arm.name: arm for arm in verdict.arms}
    microseconds = {name: float(np.median(arm.gpu_us)) for name, arm in arms.items() if arm.gpu_us}
    ratios = ", ".join(
        f"{ratio.baseline} {microseconds[ratio.baseline]:.1f} = {ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
        f" {ratio.verdict}"
        for ratio in verdict.ratios
    )
    voxfuse, eager = arms["voxfuse"], arms["eager"]
    bandwidth = verdict.bytes_moved / microseconds["voxfuse"] / 1e6
    peak = verdict.ceilings["peak_copy_bytes_per_s"] / 1e12
    text = (
        f"voxfuse {microseconds['voxfuse']:.1f} us; {ratios}; {verdict.speed_of_light:.2f} of light, "
        f"{bandwidth:.2f} of {peak:.2f} TB/s; launches {eager.launches}->{voxfuse.launches}; host {eager.host_us:.0f}->"
        f"{voxfuse.host_us:.0f} us; error {eager.error_fp64:.1e}->{voxfuse.error_fp64:.1e}"
    )
    if absent := {name: arm.absent for name, arm in arms.items() if arm.absent and name != "peer"}:
        text += f"; absent: {absent}"
    if verdict.controls["sound"] == 1.0:
        return Row(judged.case.name, text)
    return Row(judged.case.name, f"controls unsound; {text}", "ok" if dry else "wrong")  # a dry run claims nothing
