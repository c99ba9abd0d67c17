"""NVML: the driver's version, and a sampler of utilisation, memory, clocks and power beside a measurement."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

INTERVAL_S = 0.05  # NVML refreshes utilisation every 1/6 s to 1 s, clocks and power more often


REASONS = {  # bits of nvmlDeviceGetCurrentClocksEventReasons: why clocks are lower than they could be
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


class Sample(NamedTuple):
    """One reading. ``at`` is ``time.perf_counter()`` seconds; a figure the device does not report is absent.

    ``reasons`` are NVML's bits for lowered clocks, as in ``REASONS``.
    """

    at: float
    values: dict[str, float]
    reasons: int = 0


@contextlib.contextmanager
def _session() -> Iterator[ModuleType | None]:
    """The pynvml module between init and shutdown, or None where there is no NVML."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where there is no NVML."""
    with _session() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def current_gpu() -> str | None:
    """The UUID of torch's current CUDA device, or None where there is none (or torch does not tell)."""
    if not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else str(uuid)


class NvmlSampler:
    """Samples one GPU in a thread while the ``with`` block runs.

    ``gpu`` is a UUID (``GPU-…``, or without that prefix as torch gives it), or None for none. Without NVML or without
    that GPU nothing is sampled and ``absent`` says why; no error is raised.
    """

    def __init__(self, gpu: str | None, interval_s: float = INTERVAL_S) -> None:
        self.absent: str | None = None
        self.samples: list[Sample] = []
        self._gpu = gpu if gpu is None or gpu.startswith(("GPU-", "MIG-")) else f"GPU-{gpu}"
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> NvmlSampler:
        if self._gpu is None:
            self.absent = "no GPU"
            return self
        nvml = self._stack.enter_context(_session())
        if nvml is None:
            self.absent = "no NVML on this machine"
            return self
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(self._gpu)
        except nvml.NVMLError as error:
            self.absent = f"NVML does not know {self._gpu}: {error}"
            return self
        self._thread = threading.Thread(target=self._loop, args=(nvml, handle), name="voxfuse-nvml", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._stack.close()

    def means(self, begin: float, end: float) -> dict[str, float]:
        """Mean of each figure over samples taken between two ``time.perf_counter()`` times; empty where none was."""
        figures: dict[str, list[float]] = {}
        for sample in self.samples:
            if begin <= sample.at <= end:
                for name, value in sample.values.items():
                    figures.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in figures.items()}

    def throttled(self, begin: float, end: float) -> dict[str, float]:
        """The share of samples between two times at which each reason lowered the clocks, of those that were seen."""
        taken = [sample for sample in self.samples if begin <= sample.at <= end]
        shares = {name: sum(bool(sample.reasons & bit) for sample in taken) for bit, name in REASONS.items()}
        return {name: count / len(taken) for name, count in shares.items() if count}

    def _loop(self, nvml: ModuleType, handle: Any) -> None:
        readings = {
            "utilization_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        }
        read_reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        while not self._stop.wait(self._interval_s):
            values = {}
            for name, read in readings.items():
                with contextlib.suppress(nvml.NVMLError):  # a virtual GPU or MIG slice reports only some
                    values[name] = read()
            reasons = 0
            if read_reasons is not None:
                with contextlib.suppress(nvml.NVMLError):
                    reasons = int(read_reasons(handle))
            self.samples.append(Sample(time.perf_counter(), values, reasons))
