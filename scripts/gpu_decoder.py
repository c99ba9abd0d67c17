"""Steps ``decoder`` and ``launches``: the real Kokoro decoder (random weights), untouched, patched and compiled."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_suite_state import NOT_REACHED, Row, Suite
from torch.profiler import DeviceType, ProfilerActivity, profile

import voxfuse
from voxfuse.patches._kokoro_import import load_kokoro

FRAMES_PER_S = 40
WORKLOADS = ((1, 10.0), (8, 10.0))  # rows, seconds
DRY_WORKLOADS = ((1, 0.1),)
WARM_UPS, REPEATS = 5, 20
COMPILE_S = 150.0  # what compiling the whole decoder may take


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


def _patched(suite: Suite, decoder: torch.nn.Module) -> Any:
    return voxfuse.apply_patches(decoder, policy="all", backend=suite.run.backend, strict=True)


def _seeded(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(2)  # the source draws phases and noise
    return call().double()


def _snr_db(signal: torch.Tensor, other: torch.Tensor) -> float | None:
    """None where they are identical."""
    noise = (other - signal).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise > 0 else None


@torch.no_grad()
def run_walls(suite: Suite) -> Iterator[Row]:
    """One row per workload: wall of the untouched, patched and compiled decoder, and the SNR of patched."""
    for name, inputs in _workloads(suite):
        key = f"decoder-{name}"
        result = suite.saved(key)
        if result is None:
            if suite.left() < 60:
                yield Row(key, NOT_REACHED, "missing")
                continue
            decoder = random_decoder(suite.device)
            untouched = _seeded(lambda: decoder(*inputs))  # noqa: B023
            result = {"eager": _wall_ms(suite, lambda: decoder(*inputs))}  # noqa: B023
            with _patched(suite, decoder) as patches:
                patched = _seeded(lambda: decoder(*inputs))  # noqa: B023
                result["patched"] = _wall_ms(suite, lambda: decoder(*inputs))  # noqa: B023
                result["receipts"] = [
                    {"fusion": receipt.fusion, "calls": receipt.calls, "fallbacks": receipt.fallbacks}
                    for receipt in patches.receipts
                    if receipt.status == "applied"
                ]
            again = _seeded(lambda: decoder(*inputs))  # noqa: B023
            result |= {"snr_db": _snr_db(untouched, patched), "snr_eager_again_db": _snr_db(untouched, again)}
            suite.save(key, result)
        if "compile" not in result and (suite.dry or suite.left() > COMPILE_S):
            result["compile"] = _compiled(suite, random_decoder(suite.device), inputs)
            suite.save(key, result)
        yield _wall_row(key, result)


def _compiled(suite: Suite, decoder: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    torch.compiler.reset()
    compiled = torch.compile(decoder, dynamic=False, backend="eager" if suite.dry else "inductor")
    begin = time.perf_counter()
    try:
        compiled(*inputs)
        return {"compile_s": time.perf_counter() - begin, **_wall_ms(suite, lambda: compiled(*inputs))}
    except Exception as error:  # whatever the compiler raises is the result of this baseline
        return {"absent": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300]}


def _wall_row(key: str, result: dict[str, Any]) -> Row:
    calls = {receipt["fusion"]: receipt["calls"] for receipt in result["receipts"]}
    fell_back = any(receipt["fallbacks"] for receipt in result["receipts"])
    text = f"wall eager {result['eager']['median_ms']:.2f} ms, patched {result['patched']['median_ms']:.2f} ms"
    if (compiled := result.get("compile")) is not None:
        text += f", compile {compiled.get('absent') or '{:.2f} ms'.format(compiled['median_ms'])}"
    snr = ["identical" if (db := result[key]) is None else f"{db:.1f} dB" for key in ("snr_db", "snr_eager_again_db")]
    text += f"; SNR {snr[0]} (eager again: {snr[1]}); calls {calls}"
    sound = not fell_back and all(calls.values()) and len(calls) > 0
    if not sound:
        return Row(key, f"a fusion did not fire or fell back; {text}; {result['receipts']}", "wrong")
    return Row(key, text if compiled else f"{text}; compile {NOT_REACHED}", "ok" if compiled else "missing")


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
            with _patched(suite, decoder):
                result["patched"] = _profiled(suite, lambda: decoder(*inputs))  # noqa: B023
            suite.save(key, result)
        eager, patched = result["eager"], result["patched"]
        yield Row(
            key,
            f"launches {eager['launches']} -> {patched['launches']}; GPU busy {eager['busy_ms']:.2f} -> "
            f"{patched['busy_ms']:.2f} ms",
        )


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
