"""Speaking: every text in both arms with the same seed into a run directory, then timed pairs of blocks on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from typing import Protocol as Interface

import msgspec
import numpy as np

from voxfuse.e2e.fidelity import audio_sha256, compare, snr_db
from voxfuse.e2e.guards import fidelity_violation
from voxfuse.e2e.protocol import Protocol, seed_of
from voxfuse.e2e.rundir import ARMS, ArmName, Pair, RunDirectory, Spoken
from voxfuse.e2e.stack import Stack, Text
from voxfuse.fusions.graph_runner import capturing
from voxfuse.profiles.nvml import NvmlSampler, current_gpu
from voxfuse.records import ArmUtterance, Block, Receipt

Notify = Callable[[str, int, int], None]  # phase, done, of how many
DEVICE_S = 1.5  # NVML refreshes utilisation every 1/6 s to 1 s


class Patches(Interface):
    """What the gate asks of a patch set: ``voxfuse.apply_patches`` gives one."""

    @property
    def receipts(self) -> Sequence[Receipt]:
        """One receipt per fusion and target, with the calls and fallbacks so far."""

    def paused(self) -> AbstractContextManager[Any]:
        """Runs untouched code inside, the patched code again after."""

    def revert(self) -> None:
        """Untouched code again, for good."""


class Output(NamedTuple):
    """Samples (float32, mono; None where there are none to keep) and what is recorded of them."""

    samples: np.ndarray | None
    row: ArmUtterance


def speak(run: RunDirectory, stack: Stack, patches: Patches, repetitions: Iterable[int], notify: Notify) -> bool:
    """Speak what is not yet spoken; the arms' order alternates from text to text.

    Returns False where the fidelity tier stopped early, so that texts are missing on purpose. Whatever a stack raises
    is the failure of that output, recorded, not raised.
    """
    keys = [(repetition, index, text) for repetition in repetitions for index, text in enumerate(run.texts)]
    there = run.pairs()
    stop_early = run.protocol.fidelity.stop_early
    if stopped_early(run):
        return False
    missing = [key for key in keys if (key[2].id, key[0]) not in there]
    if not missing:
        return True
    counted = patches.receipts
    if run.header.device.startswith("cuda"):  # a CPU is not timed, and slow
        _warm_up(run, stack, patches, [text for _, _, text in missing])
        counted = patches.receipts  # what only warming up fell back from is no fault
    for done, (repetition, index, text) in enumerate(missing):
        notify("speaking", done + len(keys) - len(missing), len(keys))
        order = _order(index + repetition)
        pair = _speak_pair(run, stack, patches, text, repetition, order)
        before, counted = counted, patches.receipts
        run.append("receipts.jsonl", _since(before, counted))
        run.append("utterances.jsonl", pair)
        if stop_early and violates(pair, run.protocol):
            return False
    notify("speaking", len(keys), len(keys))
    return True


def stopped_early(run: RunDirectory) -> bool:
    """Whether an utterance spoken so far breaks a fidelity bound that ends the run."""
    return run.protocol.fidelity.stop_early and any(violates(pair, run.protocol) for pair in run.pairs().values())


def violates(pair: Pair, protocol: Protocol) -> bool:
    """Whether a spoken pair breaks a worst-case bound of the fidelity tier."""
    baseline, patched = pair
    return (
        fidelity_violation(baseline.output, patched.output, patched.snr_db, patched.log_spectrum_l1, protocol.fidelity)
        is not None
    )


def time_blocks(run: RunDirectory, stack: Stack, patches: Patches, kind: str, pairs: int, notify: Notify) -> None:
    """Time pairs of blocks that are not yet timed: every text in both arms, one right after the other, ABBA.

    A host changes its pace for seconds at a time, so the arms take turns from text to text, not from block to block.
    ``kind`` as in ``records.Block``; with ``a/a`` both arms run untouched code. Texts that failed in either arm are
    left out.
    """
    there = sum(block.kind == kind for block in run.blocks())
    texts = _block_texts(run)
    if there >= pairs or not texts:
        return
    touched: dict[ArmName, bool] = {"baseline": False, "patched": kind != "a/a"}
    with capturing():
        for arm in ARMS:  # warm up
            for text in texts:
                _time(run, stack, patches, text, touched[arm])
    device = _device_means(run, stack, patches, texts) if kind == "a/b" else {}
    for index in range(there, pairs):
        notify(f"timing {kind}", index, pairs)
        wall: dict[ArmName, list[float]] = {arm: [] for arm in ARMS}
        audio: dict[ArmName, list[float]] = {arm: [] for arm in ARMS}
        for turn, text in enumerate(texts, index):
            for arm in _order(turn):
                wall_s, audio_s = _time(run, stack, patches, text, touched[arm])
                wall[arm].append(wall_s)
                audio[arm].append(audio_s)
        run.append(
            "timings.jsonl",
            [
                Block(
                    kind=kind,
                    index=index,
                    first=_order(index)[0],
                    baseline_wall_s=tuple(wall["baseline"]),
                    patched_wall_s=tuple(wall["patched"]),
                    baseline_audio_s=tuple(audio["baseline"]),
                    patched_audio_s=tuple(audio["patched"]),
                    baseline_device=device.get("baseline", {}),
                    patched_device=device.get("patched", {}),
                )
            ],
        )
    notify(f"timing {kind}", pairs, pairs)


def _order(turn: int) -> Sequence[ArmName]:
    return ARMS if turn % 2 == 0 else ARMS[::-1]


def _device_means(
    run: RunDirectory, stack: Stack, patches: Patches, texts: Sequence[Text]
) -> dict[ArmName, dict[str, float]]:
    """Utilisation, memory, clocks and power of each arm by itself, over a time that NVML can resolve."""
    means: dict[ArmName, dict[str, float]] = {}
    with NvmlSampler(current_gpu()) as sampler:
        if sampler.absent is not None:
            return {}
        for arm in ARMS:
            begin = time.perf_counter()
            while time.perf_counter() < begin + DEVICE_S:
                for text in texts:
                    _time(run, stack, patches, text, touched=arm == "patched")
            means[arm] = sampler.means(begin, time.perf_counter())
    return means


def _time(run: RunDirectory, stack: Stack, patches: Patches, text: Text, touched: bool) -> tuple[float, float]:
    """Wall seconds and audio seconds of a text."""
    with contextlib.nullcontext() if touched else patches.paused(), _stage_timers(stack, on=False):
        begin = time.perf_counter()
        speech = stack.synthesize(text, seed_of(run.protocol, text.id, 0))
        return time.perf_counter() - begin, len(speech.audio) / stack.sample_rate


def _block_texts(run: RunDirectory) -> list[Text]:
    """Texts spread evenly over the run's, without those that failed."""
    spoken = run.pairs()
    sound = [
        text
        for text in run.texts
        if (text.id, 0) in spoken and not any(row.output.failure for row in spoken[text.id, 0])
    ]
    count = min(run.protocol.throughput.block_sentences, len(sound))
    return [sound[index] for index in np.linspace(0, len(sound) - 1, count).round().astype(int)]


def _warm_up(run: RunDirectory, stack: Stack, patches: Patches, texts: Sequence[Text]) -> None:
    """Unrecorded outputs: first calls allocate and compile. The patched arm speaks every text once, as a server warms
    up that captures graphs of every length that it will serve."""
    shortest = min(run.texts, key=lambda text: len(text.text))
    with patches.paused():
        _output(stack, shortest, run.protocol.seed)
    with capturing():
        for text in texts:
            _output(stack, text, run.protocol.seed)


def _speak_pair(
    run: RunDirectory,
    stack: Stack,
    patches: Patches,
    text: Text,
    repetition: int,
    order: Sequence[ArmName],
) -> tuple[Spoken, Spoken]:
    """Speak one text in both arms, keep the audio, compare the samples: baseline row, patched row."""
    seed = seed_of(run.protocol, text.id, repetition)
    outputs: dict[ArmName, Output] = {}
    for arm in order:
        with patches.paused() if arm == "baseline" else contextlib.nullcontext():
            outputs[arm] = _output(stack, text, seed)
        if run.header.unintelligible is not None:  # nobody can hear a fault
            outputs[arm] = _against_oracle(stack, outputs[arm], patches)
    for output in outputs.values():
        if output.samples is not None:
            run.put_audio(output.samples)
    baseline, patched = outputs["baseline"], outputs["patched"]
    snr = log_spectrum = None
    if baseline.samples is not None and patched.samples is not None:
        _, snr, log_spectrum, _ = compare(baseline.samples, patched.samples)
    common: dict[str, Any] = {"id": text.id, "repetition": repetition, "seed": seed}
    return (
        Spoken(arm="baseline", output=baseline.row, **common),
        Spoken(arm="patched", output=patched.row, snr_db=snr, log_spectrum_l1=log_spectrum, **common),
    )


def _against_oracle(stack: Stack, output: Output, patches: Patches) -> Output:
    """With the distance from what untouched code makes in fp64 of the same inputs; another length is a failure."""
    oracle: Callable[[], np.ndarray] | None = getattr(stack, "oracle", None)
    if oracle is None or output.samples is None:
        return output
    with patches.paused():
        exact = oracle()
    if exact.shape != output.samples.shape:
        failure = f"{output.samples.size} samples, where there should be {exact.size}"
        return Output(None, msgspec.structs.replace(output.row, failure=failure, audio_sha256=None))
    snr = snr_db(exact, output.samples)
    return Output(output.samples, msgspec.structs.replace(output.row, oracle_snr_db=snr))


def _output(stack: Stack, text: Text, seed: int) -> Output:
    """Speak once. What cannot be used as audio is a failure with its reason and no samples."""
    begin = time.perf_counter()
    try:
        with _stage_timers(stack, on=True):
            speech = stack.synthesize(text, seed)
    except Exception as error:  # any fault of a stack is that output's failure
        reason = f"{type(error).__name__}: {error}"
        return Output(None, ArmUtterance(audio_sha256=None, audio_s=0.0, failure=reason))
    return examine(speech.audio, stack.sample_rate, time.perf_counter() - begin, speech.stages)


def examine(audio: np.ndarray, sample_rate: int, wall_s: float, stages_s: dict[str, float]) -> Output:
    """Check one output and describe it; ``wall_s`` is the time it took."""
    timing: dict[str, Any] = {"wall_s": (wall_s,), "stages_s": stages_s}
    if audio.ndim != 1 or not np.issubdtype(audio.dtype, np.floating):
        failure = f"expected mono float samples, got {audio.dtype} of shape {audio.shape}"
        return Output(None, ArmUtterance(audio_sha256=None, audio_s=0.0, failure=failure, **timing))
    with np.errstate(over="ignore"):
        samples = audio.astype(np.float32)
    timing["audio_s"] = samples.size / sample_rate
    nonfinite = int(np.count_nonzero(~np.isfinite(samples)))
    if nonfinite or not samples.size:
        failure = f"{nonfinite} of {samples.size} samples are NaN or infinite" if nonfinite else "no samples"
        return Output(None, ArmUtterance(audio_sha256=None, nonfinite=nonfinite, failure=failure, **timing))
    row = ArmUtterance(
        audio_sha256=audio_sha256(samples),
        rms=float(np.sqrt(np.mean(samples.astype(np.float64) ** 2))),
        clipped=float(np.mean(np.abs(samples) >= 1.0)),
        **timing,
    )
    return Output(samples, row)


@contextlib.contextmanager
def _stage_timers(stack: Stack, on: bool) -> Iterator[None]:
    """Stage timers synchronise the device: on while speaking, off in timed blocks."""
    before, stack.timed = stack.timed, on
    try:
        yield
    finally:
        stack.timed = before


def _since(before: Sequence[Receipt], after: Sequence[Receipt]) -> list[Receipt]:
    """Receipts with the calls and fallbacks counted between two readings."""
    earlier = {(receipt.fusion, receipt.target): receipt for receipt in before}
    result = []
    for receipt in after:
        start = earlier.get((receipt.fusion, receipt.target))
        if start is not None:
            fallbacks = {
                reason: count - start.fallbacks.get(reason, 0)
                for reason, count in receipt.fallbacks.items()
                if count > start.fallbacks.get(reason, 0)
            }
            receipt = msgspec.structs.replace(receipt, calls=receipt.calls - start.calls, fallbacks=fallbacks)
        result.append(receipt)
    return result
