"""What the machine can do, measured in the run that judges: copy bandwidth, matmul throughput, and the launch floor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from voxfuse.fusions._graph_arena import abandon
from voxfuse.microbench.timer import Clock, Inputs, sample_us

L2_FACTOR = 3  # inputs rotate over more than this many times the L2
MOST_SETS = 512  # a graph of thousands of small calls takes minutes to capture
HOST_SETS = 2  # on a CPU nothing is claimed about caches
PEAK_FOOTPRINT_BYTES = 1 << 30
PEAK_MATMUL = 8192  # rows and columns of the square matrices
HOST_FOOTPRINT_BYTES, HOST_MATMUL = 1 << 20, 256  # a CPU's figures are carried, and nothing is claimed by them
MATMULS = ("fp32", "tf32", "bf16")


def rotation(footprint_bytes: int, device: torch.device) -> int:
    """How many input sets of that footprint (bytes read and written by one call) exceed three times the L2.

    At most ``MOST_SETS``: calls on less than about 0.3 MB find their inputs in the L2.
    """
    if device.type != "cuda":
        return HOST_SETS
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_SETS, max(2, L2_FACTOR * l2_bytes // max(1, footprint_bytes) + 1))


def copy_bytes_per_s(clock: Clock, footprint_bytes: int, device: torch.device) -> float:
    """Bandwidth in bytes/s, reads plus writes, of the faster of memcpy and an elementwise kernel.

    Half of ``footprint_bytes`` is read and half written, rotating as a judged call does, so a small footprint's
    figure contains the cost of one launch.
    """
    elements = max(1, footprint_bytes // 8)
    buffers: list[Inputs] = [
        (torch.randn(elements, device=device), torch.empty(elements, device=device))
        for _ in range(rotation(footprint_bytes, device))
    ]
    fastest_us = min(
        sample_us(clock, lambda source, target: target.copy_(source), buffers),
        sample_us(clock, lambda source, target: torch.neg(source, out=target), buffers),
    )
    return 8 * elements / (fastest_us * 1e-6)


def machine_ceilings(clock: Clock, device: torch.device) -> dict[str, float]:
    """The ceilings that hold for every case of a run: ``launch_floor_us``, ``peak_copy_bytes_per_s`` and
    ``peak_<precision>_flop_per_s`` of ``MATMULS``."""
    footprint = PEAK_FOOTPRINT_BYTES if device.type == "cuda" else HOST_FOOTPRINT_BYTES
    found = {
        "launch_floor_us": launch_floor_us(clock, device),
        "peak_copy_bytes_per_s": copy_bytes_per_s(clock, footprint, device),
    }
    size = PEAK_MATMUL if device.type == "cuda" else HOST_MATMUL
    return found | {f"peak_{name}_flop_per_s": matmul_flop_per_s(clock, name, size, device) for name in MATMULS}


def matmul_flop_per_s(clock: Clock, precision: str, size: int, device: torch.device) -> float:
    """Operations/s (two per multiply-add) of torch's matmul of square matrices in one of ``MATMULS``.

    ``tf32`` is fp32 with TF32 allowed; where the device has none it is fp32 once more.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        microseconds = sample_us(clock, torch.mm, [(a, b)], repetitions=10)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2 * size**3 / (microseconds * 1e-6)


def launch_floor_us(clock: Clock, device: torch.device) -> float:
    """Microseconds of the smallest kernel there is, as one node of a replayed graph (on a CPU: of one small call)."""
    one = torch.ones(1, device=device)
    return sample_us(clock, lambda tensor: tensor.neg_(), [(one,)] * 100)


def peak_bytes(call: Callable[..., Any], inputs: Inputs, device: torch.device) -> int | None:
    """Device bytes that one call allocates at its peak, outputs included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call(*inputs)
    return torch.cuda.max_memory_allocated(device) - before


def launches(call: Callable[..., Any], inputs: Inputs, device: torch.device) -> int | None:
    """Nodes (kernels, copies, fills) of the CUDA graph of one call; None on a CPU, under ROCm, and where it cannot be
    captured.

    Counted on the graph: a profiler's hooks would stay and slow later host timings.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    call(*inputs)
    torch.cuda.synchronize()
    graph, pool, current = (
        torch.cuda.CUDAGraph(keep_graph=True),
        torch.cuda.graph_pool_handle(),
        torch.cuda.current_stream(),
    )
    try:
        with torch.cuda.graph(graph, pool=pool):
            call(*inputs)
    except RuntimeError:  # it waits for the device
        abandon(current, pool)
        return None
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes failed with CUDA driver error {status}")
    return count.value
