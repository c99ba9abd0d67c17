"""Wall and GPU-busy time of HiFT (CosyVoice2, CosyVoice3, Chatterbox) at the released shapes with random weights, on a
GPU:

    PYTHONPATH=SITE:. python scripts/gpu_hift.py [--out FILE] [--stack cosyvoice3] [--compile] [--quick]

SITE holds ``cosyvoice-minicpmo`` and ``chatterbox-tts``, installed with --no-deps; CosyVoice3 is a checkout named by
COSYVOICE_HOME, or our reference. Prints one JSON object a line, for each (rows, mel frames; 50 frames a second): ms of
``decode`` and of ``inference``, untouched, with fused blocks and source alone, and from graphs; kernels launched and
GPU-busy ms; the error of ``decode`` against fp64; of CosyVoice3 a hop of a stream (``finalize=False``); and, once a
stack, a batch of 16 rows of mixed lengths (1 to 12 s), whole and in groups, against the same audio in 16 equal rows.
``--quick`` is for a step of a minute: 10 s of 1 and 16 rows and the mixed batch, untouched and from graphs, few
repetitions, a short line on the terminal (the whole one in FILE). What raises is a line too.
``--device cpu --width 32`` is a dry run.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hift_classes  # noqa: E402 - the checkout need not be installed

import voxfuse  # noqa: E402
from voxfuse.fusions.graph_runner import capturing  # noqa: E402
from voxfuse.fusions.grouping import by_padding, decode_rows  # noqa: E402
from voxfuse.fusions.hift_graph import Runners  # noqa: E402
from voxfuse.kernels._op import Run  # noqa: E402

SHAPES = ((1, 100), (1, 500), (8, 500), (16, 500))
QUICK_SHAPES = ((1, 500), (16, 500))
ARMS = {
    "blocks": ["snake_conv_block", "sine_source"],
    "graph": ["hift_graph", "hift_source_graph"],
}
MIXED_S = (1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12)
WARM_UPS, REPEATS = 5, 20
device = torch.device("cuda")


def synchronize() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def wall_ms(call: Callable[[], Any]) -> float:
    """Median wall time with a synchronisation per call."""
    walls = []
    for index in range(WARM_UPS + REPEATS):
        begin = time.perf_counter()
        call()
        synchronize()
        if index >= WARM_UPS:
            walls.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(walls)


def busy(call: Callable[[], Any]) -> dict[str, float]:
    """Device activities of one call, and the union of their intervals in ms."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
        synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    )
    total, last = 0.0, 0.0
    for start, end in events:
        total += max(end - max(start, last), 0.0)
        last = max(last, end)
    return {"launches": len(events), "busy_ms": total / 1e3}


def inputs(rows: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """mel [rows, 80, frames] and source [rows, 1, samples]."""
    torch.manual_seed(1)
    turns = torch.arange(frames * 480, device=device) * 0.04
    noise = 0.02 * torch.randn(rows, 1, frames * 480, device=device)
    return torch.randn(rows, 80, frames, device=device), 0.1 * torch.sin(turns) + noise


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def snr_db(value: torch.Tensor, baseline: torch.Tensor) -> float:
    """Of the patched against the untouched audio."""
    noise = (value.double() - baseline.double()).square().sum()
    return float(10 * torch.log10(baseline.double().square().sum() / noise))


def exact_decode(hift: Any, mel: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``decode`` of the first row in fp64."""
    apart = {id(hift.f0_predictor): torch.nn.Identity(), id(hift.m_source): torch.nn.Identity()}
    double = copy.deepcopy(hift, apart).double()
    double.stft_window = double.stft_window.double()
    return double.decode(x=mel[:1].double(), s=source[:1].double())


def measured(hift: Any, mel: torch.Tensor, source: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """decode and inference as they are now."""
    result = {
        "decode_ms": wall_ms(lambda: hift.decode(mel, source)),
        "inference_ms": wall_ms(lambda: hift.inference(mel)),
        "error_fp64": relative_error(hift.decode(mel, source)[:1], exact),
        **busy(lambda: hift.decode(mel, source)),
        "inference": busy(lambda: hift.inference(mel)),
    }
    if hasattr(hift, "conv_pre_look_right"):
        result["hop_ms"] = wall_ms(lambda: hift.inference(mel, finalize=False))
    return result


def warm(hift: Any, mel: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Capture what ``measured`` calls."""
    with capturing():
        audio = hift.decode(mel, source)
        hift.inference(mel)
        if hasattr(hift, "conv_pre_look_right"):
            hift.inference(mel, finalize=False)
    return audio


def shape(stack: str, hift: Any, rows: int, frames: int, compiled: bool) -> dict[str, Any]:
    """All arms at one shape."""
    mel, source = inputs(rows, frames)
    baseline, exact = hift.decode(mel, source), exact_decode(hift, mel, source)
    eager = measured(hift, mel, source, exact)
    result: dict[str, Any] = {"stack": stack, "rows": rows, "frames": frames, "eager": eager}
    backend = "triton" if device.type == "cuda" else "reference"
    for arm, fusions in ARMS.items():
        if arm == "graph" and device.type != "cuda":
            continue
        with voxfuse.apply_patches(stack, include=fusions, policy="all", backend=backend) as patches:
            audio = warm(hift, mel, source)
            before = {r.fusion: sum(r.fallbacks.values()) for r in patches.receipts}
            result[arm] = measured(hift, mel, source, exact) | {"snr_db": snr_db(audio, baseline)}
            late = [r for r in patches.receipts if sum(r.fallbacks.values()) > before[r.fusion]]
            result[arm]["fallbacks"] = {r.fusion: dict(r.fallbacks) for r in late}
    if compiled:
        for mode in ("default", "reduce-overhead"):
            torch.compiler.reset()
            call = torch.compile(hift.decode, dynamic=False, mode=mode)
            try:
                result[f"compile {mode}"] = {"decode_ms": wall_ms(lambda: call(mel, source))}  # noqa: B023
            except Exception as error:  # whatever the compiler raises is the result of this baseline
                result[f"compile {mode}"] = {"absent": f"{type(error).__name__}: {error}"[:300]}
    return result


def mixed(stack: str, hift: Any) -> dict[str, Any]:
    """16 rows of 1 to 12 s in one call, and in groups, against the same audio in 16 equal rows, all from graphs."""
    if device.type != "cuda":
        return {"stack": stack, "mixed": "needs a GPU"}
    graphs = Runners(Run("triton", "mixed"), "first_use")
    frames = [50 * seconds for seconds in MIXED_S]
    mel, source = inputs(len(frames), max(frames))
    even = inputs(len(frames), sum(frames) // len(frames))
    mels = [mel[row, :, :length].contiguous() for row, length in enumerate(frames)]
    sources = [source[row, :, : 480 * length].contiguous() for row, length in enumerate(frames)]
    assert not isinstance(graphs.decode(hift, mel, source, lengths=frames), str)
    assert not isinstance(graphs.decode(hift, *even), str)
    together = decode_rows(graphs, hift, mels, sources)
    alone = [hift.decode(mel[None], source[None])[0] for mel, source in zip(mels, sources, strict=True)]
    return {
        "stack": stack,
        "mixed_ms": wall_ms(lambda: graphs.decode(hift, mel, source, lengths=frames)),
        "grouped_ms": wall_ms(lambda: decode_rows(graphs, hift, mels, sources)),
        "groups": [len(group) for group in by_padding(frames)],
        "equal_ms": wall_ms(lambda: graphs.decode(hift, *even)),
        "snr_db_worst": min(snr_db(*pair) for pair in zip(together, alone, strict=True)),
    }


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Of a shape, untouched then patched, what a terminal shows."""
    arms = [result[arm] for arm in ("eager", *ARMS) if arm in result]
    if len(arms) < 2:
        return result
    keys = ("decode_ms", "inference_ms", "busy_ms", "launches", "error_fp64")
    short = {key: [arm[key] for arm in arms] for key in keys}
    ratio = arms[0]["inference_ms"] / arms[-1]["inference_ms"]
    return {key: result[key] for key in ("stack", "rows", "frames")} | short | {
        "inference_ratio": ratio, "fallbacks": arms[-1]["fallbacks"]
    }  # fmt: skip


def attempted(stack: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a call found, or what it raised: the next one must not wait for another run."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc(limit=-3)
        return {"stack": stack, "broke": f"{type(error).__name__}: {error}"[:300]}


@torch.inference_mode()
def main() -> None:
    """Measure and print; exits with 1 where something raised."""
    global device, WARM_UPS, REPEATS
    broke = False
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stack", choices=[*hift_classes.MODULES], action="append")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: minutes")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, arms and repetitions")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=512, help="channels: 512 as released")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = QUICK_SHAPES if options.quick else SHAPES
    if options.quick:
        del ARMS["blocks"]
        WARM_UPS, REPEATS = 3, 12
    if device.type == "cpu":
        shapes, WARM_UPS, REPEATS = ((1, 12), (2, 20)), 0, 1
    for stack in options.stack or hift_classes.MODULES:
        if hift_classes.importable(stack) is None:
            print(json.dumps({"stack": stack, "absent": "its distribution is not installed"}), flush=True)
            continue
        with torch.inference_mode(False):
            torch.manual_seed(0)
            settings = hift_classes.RELEASED | {"in_channels": 80, "base_channels": options.width, "nb_harmonics": 8}
            hift = hift_classes.generator(stack, **settings, cond_channels=options.width).to(device)
        results = [lambda r=r, t=t: shape(stack, hift, r, t, options.compile) for r, t in shapes]  # noqa: B023
        for call in (*results, lambda: mixed(stack, hift)):  # noqa: B023
            result = attempted(stack, call)
            broke = broke or "broke" in result
            print(json.dumps(brief(result) if options.quick else result), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    sys.exit(broke)


if __name__ == "__main__":
    main()
