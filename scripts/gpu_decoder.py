"""Steps ``decoder`` and ``launches``: the real Kokoro decoder (random weights), untouched, patched and compiled."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_suite_state import NOT_REACHED, Row, Suite
from torch.profiler import DeviceType, ProfilerActivity, profile

import voxfuse
from voxfuse.fusions.graph_runner import capturing
from voxfuse.patches._kokoro_import import load_kokoro

FRAMES_PER_S = 40
WORKLOADS = ((1, 10.0), (8, 10.0))  # rows, seconds
DRY_WORKLOADS = ((1, 0.1),)
WARM_UPS, REPEATS = 5, 20
COMPILE_S = 90.0  # what compiling the whole decoder may take
ARMS: dict[str, dict[str, list[str]]] = {  # arguments of apply_patches
    "fusions": {"exclude": ["decoder_graph", "text_graph"]},
    "graph": {"include": ["decoder_graph", "sine_source"]},
}
COMPILE_MODES = {"compile": "default", "compile_graph": "reduce-overhead"}


@functools.cache
def random_decoder(device: torch.device) -> torch.nn.Module:
    """kokoro.istftnet.Decoder as released (Kokoro-82M's config.json), weights as its constructor leaves them."""
    load_kokoro()
    from kokoro.istftnet import Decoder

    torch.manual_seed(0)
    decoder = Decoder(
        dim_in=512,
        style_dim=128,
        dim_out=80,
        resblock_kernel_sizes=[3, 7, 11],
        upsample_rates=[10, 6],
        upsample_initial_channel=512,
        resblock_dilation_sizes=[[1, 3, 5]] * 3,
        upsample_kernel_sizes=[20, 12],
        gen_istft_n_fft=20,
        gen_istft_hop_size=5,
    )
    return decoder.eval().to(device)


def decoder_inputs(rows: int, seconds: float, device: torch.device) -> tuple[torch.Tensor, ...]:
    """asr [rows, 512, frames], F0 in Hz and N [rows, 2·frames], style [rows, 128]; 40 frames a second."""
    generator = torch.Generator(device).manual_seed(1)
    frames = round(FRAMES_PER_S * seconds)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    f0 = 120 + 20 * torch.nn.functional.avg_pool1d(normal(rows, 2 * frames + 24), 25, stride=1)
    return normal(rows, 512, frames), f0, normal(rows, 2 * frames), 0.3 * normal(rows, 128)


def _workloads(suite: Suite) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    for rows, seconds in DRY_WORKLOADS if suite.dry else WORKLOADS:
        yield f"{rows}x{seconds:g}s", decoder_inputs(rows, seconds, suite.device)


def _wall_ms(suite: Suite, call: Callable[[], Any]) -> dict[str, float]:
    """Wall time with a synchronisation per call, as a caller that needs the audio sees it."""
    walls = []
    for index in range(3 if suite.dry else WARM_UPS + REPEATS):
        begin = time.perf_counter()
        call()
        if not suite.dry:
            torch.cuda.synchronize()
        if index >= (1 if suite.dry else WARM_UPS):
            walls.append((time.perf_counter() - begin) * 1e3)
    return {"median_ms": statistics.median(walls), "min_ms": min(walls), "max_ms": max(walls)}


@contextlib.contextmanager
def _patched(suite: Suite, decoder: torch.nn.Module, arm: str, inputs: tuple[torch.Tensor, ...]) -> Iterator[Any]:
    """The decoder patched as an arm says, its graph captured."""
    with voxfuse.apply_patches(decoder, policy="all", backend=suite.run.backend, **ARMS[arm]) as patches:
        with capturing():
            decoder(*inputs)
        yield patches


def _applied(patches: Any) -> list[dict[str, Any]]:
    """Calls and fallbacks of what an arm applied and reached: inner fusions are idle where a graph serves."""
    return [
        {"fusion": receipt.fusion, "calls": receipt.calls, "fallbacks": receipt.fallbacks}
        for receipt in patches.receipts
        if receipt.status == "applied" and (receipt.calls or receipt.fallbacks)
    ]


def _seeded(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(2)  # the source draws phases and noise
    return call().double()


def _snr_db(signal: torch.Tensor, other: torch.Tensor) -> float | None:
    """None where they are identical."""
    noise = (other - signal).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise > 0 else None


@torch.no_grad()
def run_walls(suite: Suite) -> Iterator[Row]:
    """One row per workload: wall of the untouched, patched and compiled decoder, and the SNR of the patched ones."""
    for name, inputs in _workloads(suite):
        key = f"decoder-{name}"
        result = suite.saved(key)
        if result is None:
            if suite.left() < 60:
                yield Row(key, NOT_REACHED, "missing")
                continue
            result = _eager_and_patched(suite, random_decoder(suite.device), inputs)
            suite.save(key, result)
        modes = {"compile": "default"} if suite.dry else COMPILE_MODES
        for arm, mode in modes.items():
            if arm not in result and (suite.dry or suite.left() > COMPILE_S):
                result[arm] = _compiled(suite, random_decoder(suite.device), inputs, mode)
                suite.save(key, result)
        yield _wall_row(key, result, modes)


def _eager_and_patched(suite: Suite, decoder: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    def call() -> torch.Tensor:
        return decoder(*inputs)

    untouched = _seeded(call)
    result: dict[str, Any] = {"eager": _wall_ms(suite, call), "receipts": {}, "snr_db": {}}
    for arm in ARMS:
        with _patched(suite, decoder, arm, inputs) as patches:
            result["snr_db"][arm] = _snr_db(untouched, _seeded(call))
            result[arm] = _wall_ms(suite, call)
            result["receipts"][arm] = _applied(patches)
    result["snr_db"]["eager again"] = _snr_db(untouched, _seeded(call))
    return result


def _compiled(suite: Suite, decoder: torch.nn.Module, inputs: tuple[torch.Tensor, ...], mode: str) -> dict[str, Any]:
    torch.compiler.reset()
    options = {"backend": "eager"} if suite.dry else {"mode": mode}
    compiled = torch.compile(decoder, dynamic=False, **options)
    begin = time.perf_counter()
    try:
        compiled(*inputs)
        return {"compile_s": time.perf_counter() - begin, **_wall_ms(suite, lambda: compiled(*inputs))}
    except Exception as error:  # whatever the compiler raises is the result of this baseline
        return {"absent": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300]}


def _wall_row(key: str, result: dict[str, Any], modes: dict[str, str]) -> Row:
    arms = ["eager", *ARMS, *modes]
    walls = [
        f"{arm} {result[arm].get('absent') or '{:.2f} ms'.format(result[arm]['median_ms'])}"
        for arm in arms
        if arm in result
    ]
    snr = [f"{arm} {'identical' if db is None else f'{db:.1f} dB'}" for arm, db in result["snr_db"].items()]
    calls = {arm: {row["fusion"]: row["calls"] for row in rows} for arm, rows in result["receipts"].items()}
    text = f"wall {', '.join(walls)}; SNR {', '.join(snr)}; calls {calls}"
    rows = [row for arm in result["receipts"].values() for row in arm]
    if any(row["fallbacks"] for row in rows) or not all(result["receipts"].values()):
        return Row(key, f"a fusion did not fire or fell back; {text}; {result['receipts']}", "wrong")
    missing = [arm for arm in modes if arm not in result]
    return Row(key, f"{text}; {', '.join(missing)} {NOT_REACHED}" if missing else text, "missing" if missing else "ok")


@torch.no_grad()
def run_launches(suite: Suite) -> Iterator[Row]:
    """One row per workload: kernels and GPU busy time of one call, untouched and patched."""
    for name, inputs in _workloads(suite):
        key = f"launches-{name}"
        result = suite.saved(key)
        if result is None:
            if suite.left() < 30:
                yield Row(key, NOT_REACHED, "missing")
                continue
            decoder = random_decoder(suite.device)
            result = {"eager": _profiled(suite, lambda: decoder(*inputs))}  # noqa: B023
            for arm in ARMS:
                with _patched(suite, decoder, arm, inputs):
                    result[arm] = _profiled(suite, lambda: decoder(*inputs))  # noqa: B023
            suite.save(key, result)
        figures = [
            f"{arm} {result[arm]['launches']} launches, GPU busy {result[arm]['busy_ms']:.2f} ms"
            for arm in ("eager", *ARMS)
        ]
        yield Row(key, "; ".join(figures))


def _profiled(suite: Suite, call: Callable[[], Any]) -> dict[str, Any]:
    """Device activities (kernels, copies, fills) of one call after warming up, and the union of their intervals."""
    activity = ProfilerActivity.CPU if suite.dry else ProfilerActivity.CUDA
    for _ in range(1 if suite.dry else WARM_UPS):
        call()
    with profile(activities=[activity]) as profiler:
        call()
        if not suite.dry:
            torch.cuda.synchronize()
    device = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    busy_us = until = 0.0
    for begin, end in sorted((event.time_range.start, event.time_range.end) for event in device):
        busy_us += max(0.0, end - max(begin, until))
        until = max(until, end)
    by_name: dict[str, list[float]] = {}
    for event in device:
        by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "launches": len(device),
        "busy_ms": busy_us / 1e3,
        "top": [{"name": name[:160], "calls": len(us), "ms": sum(us) / 1e3} for name, us in top],
    }
