"""Step ``sanitizer``: every kernel at awkward small shapes under compute-sanitizer's memcheck and racecheck.

``python scripts/gpu_sanitizer.py [--kernels NAME,...]`` is the program that is watched: each call once (of all kernels,
or of those that match), allocations without a cache, so that an access one element beyond a tensor is one beyond an
allocation. Inputs are made on the host: torch's own kernels would be watched too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from gpu_suite_state import KILLED_AFTER_S, NOT_REACHED, ONE_CORE, Row, Suite, last_line

from voxfuse.kernels._hopper_conv import packed
from voxfuse.kernels._op import TALLIES, FusedOp, Run
from voxfuse.kernels.adain import adain_act
from voxfuse.kernels.adain_channels_last import adain_channels_last
from voxfuse.kernels.conv1d_snake import conv1d_snake
from voxfuse.kernels.embedding_sum import embedding_sum
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.held_source import held_source
from voxfuse.kernels.istft import istft_limited, istft_polar
from voxfuse.kernels.mean_act import mean_act
from voxfuse.kernels.moments import moments, residual_moments
from voxfuse.kernels.qk_norm_rope import qk_norm_rope
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.ras_sampler import ras_sample
from voxfuse.kernels.rmsnorm import add_rms_norm, rms_norm
from voxfuse.kernels.sampler import sample
from voxfuse.kernels.sine_source import sine_source
from voxfuse.kernels.skinny_gemm import skinny_linear, skinny_swiglu
from voxfuse.kernels.small_attention import small_attention
from voxfuse.kernels.snake import snake
from voxfuse.kernels.snake_conv_pair import packed_pair, snake_conv_pair
from voxfuse.kernels.stepped_source import stepped_source
from voxfuse.kernels.stft import stft_complex, stft_polar
from voxfuse.kernels.swiglu import swiglu

TOOLS = ("memcheck", "racecheck")
HOPPER = ("snake_conv_pair", "conv1d_snake")  # of compute capability 9.0 alone
FOUND = 86  # exit status that compute-sanitizer gives where it found something
FEWEST_SECONDS = 30.0 + KILLED_AFTER_S


def run(suite: Suite) -> Iterator[Row]:
    """One row a tool, side by side."""
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        yield from pool.map(partial(_watched, suite), TOOLS)


def _watched(suite: Suite, tool: str) -> Row:
    kernels = ",".join(suite.kernels)
    key, title = f"sanitizer-{tool}", f"{tool} of {kernels or 'all kernels'}"
    saved = suite.saved(key)
    if saved is not None and saved["kernels"] in (kernels, ""):
        return Row(title, saved["text"])
    if suite.dry:
        return Row(title, f"{len(matching(suite.kernels))} calls, not watched on a CPU")
    command = shutil.which("compute-sanitizer")
    if command is None:
        return Row(title, "compute-sanitizer is not on PATH", "missing")
    if suite.left() < FEWEST_SECONDS:
        return Row(title, NOT_REACHED, "missing")
    log = suite.file(f"{key}.txt")
    watched = [command, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, __file__, "--kernels", kernels]
    status = suite.program(watched, log, {**ONE_CORE, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    lines = log.read_text(errors="replace").splitlines()
    reports = [line for line in lines if line.startswith("=========") and "COMPUTE-SANITIZER" not in line]
    if status is None:
        reached = f"{NOT_REACHED}; the last line: {last_line(log)}"
        return Row(title, f"{reached}; {reports[0]}" if reports else reached, "wrong" if reports else "missing")
    text = "; ".join(line for line in lines if "SUMMARY" in line or "fallbacks" in line) or last_line(log)
    if status == 0:
        suite.save(key, {"kernels": kernels, "text": text})
        return Row(title, text)
    print("\n".join(reports)[:6000], flush=True)
    return Row(title, f"status {status}: {text}; see {log.name}", "wrong")


def calls(device: torch.device) -> Iterator[tuple[FusedOp, tuple[Any, ...]]]:
    """Every kernel with sizes off its blocks, lengths inside of the rows, and strides that are not its own."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    for channels, frames in ((5, 67), (33, 129), (128, 1000), (8, 8200)):
        lengths = torch.tensor([frames, frames // 2], device=device)
        style, weight, bias = normal(2, 2 * channels), normal(channels), normal(channels)
        alpha = normal(channels).exp()
        yield adain_act, (normal(2, channels, frames), style, weight, bias, alpha, lengths, 1e-5, 0.0)
        for phases in (1, 3, 5):
            padded = -(-frames // phases) * phases
            x, residual = normal(2, padded, channels), normal(2, frames, channels)
            known = moments.reference(x, lengths, frames, phases)
            affine = style, weight, bias, alpha, lengths
            yield moments, (x, lengths, frames, phases)
            yield residual_moments, (x, bias, residual, lengths, frames, phases)
            yield adain_channels_last, (x, known, *affine, frames, phases, 6 - phases, phases, 2, 1e-5, 0.0)
            yield snake, (x, bias, residual, alpha, lengths, frames, phases, 6 - phases, phases, 2, True)
            longer = normal(2, x.shape[1] + 6 * phases, channels)  # of a causal convolution
            yield snake, (longer, bias, residual, alpha, lengths, frames, phases, 6 - phases, phases, 2, True)
        yield residual_moments, (normal(2, channels, frames).transpose(1, 2), None, None, lengths, frames, 1)
        yield mean_act, (*(normal(2, channels, frames) for _ in range(3)), lengths, 3.0, 0.1)
    window = torch.hann_window(20, device=device)
    for samples in (11, 240, 5003):
        lengths = torch.tensor([samples, max(11, samples // 2)], device=device)
        yield stft_polar, (normal(2, samples), window, lengths, 5)
        yield stft_complex, (normal(2, samples), window, lengths, 5, 14, samples // 5 + 30, 24)
        frames = samples // 5 + 1
        ends = torch.tensor([frames, max(2, frames // 2)], device=device)
        spectrum = normal(2, 11, frames), normal(2, 11, frames), window, ends, 5
        yield istft_polar, (*spectrum, "exp_sin")
        yield istft_limited, (*spectrum, 100.0, 0.99)
    for frames in (1, 7, 40):
        samples = 300 * frames
        source = (100 + 50 * normal(2, samples)).abs(), torch.rand(2, 9, device=device), normal(2, samples, 9)
        yield sine_source, (*source, normal(1, 9), normal(1), None, 300, 24_000.0, 0.1, 0.003, 10.0)
        ends = torch.tensor([frames, frames // 2], device=device)
        f0, linear = source[0][:, ::300].contiguous(), (normal(1, 9), normal(1))
        yield stepped_source, (f0, *source[1:], *linear, ends, 300, 24_000.0, 0.1, 0.003, 10.0)
        yield held_source, (normal(2, frames, 9), f0, source[2], *linear, ends, 300, 0.1, 0.003, 10.0)
    for width in (7, 896, 1000):
        x, weight = normal(3, width), normal(width)
        yield rms_norm, (x, weight, 1e-6, "cast_then_scale")
        yield add_rms_norm, (x, normal(3, width), weight, 1e-6, "cast_then_scale")
        yield swiglu, (x, normal(3, width))
    for rows, inputs, outputs in ((1, 100, 7), (3, 1025, 61), (16, 2056, 1000)):
        for dtype in (torch.float32, torch.bfloat16):
            x, gate, up = (normal(size, inputs).to(dtype) for size in (rows, outputs, outputs))
            norm, bias, residual = (normal(*shape).to(dtype) for shape in ((inputs,), (outputs,), (rows, outputs)))
            yield skinny_linear, (x, gate, bias, residual, norm, 1e-6, "cast_then_scale")
            yield skinny_linear, (x, gate, None, None, None, 0.0, "cast_then_scale")
            yield skinny_swiglu, (x, gate, up, bias, None, norm, 1e-6, "cast_then_scale")
        ids, starts = torch.tensor([[0, 4], [4, 0], [9, 9]], device=device), torch.tensor([0, 5], device=device)
        yield embedding_sum, (ids, normal(10, inputs), starts, "each")  # the last token's ids are beyond the table
    for vocabulary in (7, 1000, 6561):
        noise = torch.rand(2, vocabulary, device=device) + 1e-3
        recent = torch.zeros(2, 10, dtype=torch.int64, device=device)
        yield sample, (normal(2, vocabulary), normal(2, vocabulary) > 1, noise, 0.8, 5, 0.9, 1.1)
        yield ras_sample, (normal(2, vocabulary).softmax(1), recent, noise[:, :25].contiguous(), noise, 0.8, 1.0, False)
    for heads, kv_heads, keys in ((14, 2, 65), (4, 4, 300)):
        ends = torch.tensor([keys, 3], device=device)
        kv = normal(2, kv_heads, keys, 64), normal(2, kv_heads, keys, 64)
        yield gqa_decode, (normal(2, heads, 1, 64), *kv, ends, None, 0.125, True, 0)
        heads_of_token = normal(2, 1, heads, 64), normal(2, 1, kv_heads, 64)
        rope = (
            normal(2, 1, 64),
            normal(2, 1, 64),
            normal(64),
            normal(64),
            1e-6,
            "cast_then_scale",
            "half",
            [],
            False,
            False,
        )
        yield qk_norm_rope, (*heads_of_token, *rope)
        slots = torch.tensor([[keys - 1], [2]], device=device)
        yield qk_norm_rope_cached, (*heads_of_token, normal(2, 1, kv_heads, 64), *kv, slots, *rope)
        few = normal(2, kv_heads, 17, 64), normal(2, kv_heads, 17, 64), torch.tensor([16, 0], device=device)
        yield small_attention, (*heads_of_token, normal(2, 1, kv_heads, 64), *few, *rope, 0.125)


def _hopper_calls(device: torch.device) -> Iterator[tuple[FusedOp, tuple[Any, ...]]]:
    """Kernels that are for compute capability 9.0 alone, at ends of tiles: 254 frames of a pair with 3 taps."""
    for channels, frames, taps, dilation in ((64, 254, 3, 1), (64, 255, 11, 5), (128, 17, 7, 3), (128, 600, 3, 5)):
        x, weights = torch.randn(2, frames, channels), torch.randn(2, channels, taps, channels) / channels
        alphas, biases = torch.rand(2, channels) + 0.5, torch.randn(2, channels)
        lengths = torch.tensor([frames, frames // 2])
        for dtype in (torch.float32, torch.bfloat16):
            y, w, (alpha1, alpha2), (bias1, bias2) = (part.to(device, dtype) for part in (x, weights, alphas, biases))
            ends = lengths.to(device)
            yield (
                snake_conv_pair,
                (y, w, packed_pair(w), alpha1, bias1, alpha2, bias2, ends, dilation, taps - 1, taps // 2),
            )
            single = w[0], packed(w[0])
            yield conv1d_snake, (y, *single, alpha1, bias1, y, alpha2, ends, dilation, taps // 2, True)
            yield conv1d_snake, (y, *single, None, bias1, None, alpha2, None, dilation, taps - 1, False)


def matching(kernels: tuple[str, ...]) -> list[tuple[FusedOp, tuple[Any, ...]]]:
    """The calls of the kernels that match a pattern (none: of all that this GPU runs), on the host.

    Raises KeyError where a pattern matches no kernel.
    """
    host = torch.device("cpu")
    found = list(calls(host))
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        found = [*_hopper_calls(host), *found]
    names = {op.name for op, _ in found}
    for pattern in kernels:
        if not any(fnmatchcase(name, pattern) for name in (*names, *HOPPER)):
            raise KeyError(f"no kernel matches {pattern!r}; watched are {', '.join(sorted(names))}")
    return [call for call in found if not kernels or any(fnmatchcase(call[0].name, pattern) for pattern in kernels)]


@torch.no_grad()
def main() -> None:
    """Make the calls, a line for each kernel as it is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="", help="patterns of kernels, separated by commas; default: all")
    kernels = parser.parse_args().kernels
    run, device = Run("triton", "sanitizer"), torch.device("cuda")
    chosen = matching(tuple(filter(None, kernels.split(","))))
    reached = ""
    for index, (op, arguments) in enumerate(chosen):
        if op.name != reached:
            reached = op.name
            print(f"call {index} of {len(chosen)}: {reached}", flush=True)
        op(*(value.to(device) if torch.is_tensor(value) else value for value in arguments), run=run)
        torch.cuda.synchronize()
    fallbacks = dict(TALLIES.of(run.receipt).fallbacks)
    print(f"{len(chosen)} calls, fallbacks {fallbacks}")
    sys.exit(1 if fallbacks else 0)


if __name__ == "__main__":
    main()
