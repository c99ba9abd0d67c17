"""The NVML sampler against an NVML of the test's own, and where there is none."""

import sys
import time
from types import SimpleNamespace

import pytest

from voxfuse.profiles import nvml
from voxfuse.profiles.environment import capture_environment
from voxfuse.profiles.nvml import NvmlSampler, Sample, driver_version
from voxfuse.records import Environment, to_json


class FakeNvml(SimpleNamespace):
    """One GPU, ``GPU-a``, whose power is not reported."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, fails=False):
        super().__init__(open=0)
        self.fails = fails

    def nvmlInit(self):
        if self.fails:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "570.1"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-a":
            raise self.NVMLError("not found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=1 << 30)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # the name of older nvidia-ml-py
        return 0x4 | 0x40

    def nvmlDeviceGetPowerUsage(self, handle):
        raise self.NVMLError("not supported")


@pytest.fixture
def fake(monkeypatch):
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_samples_what_the_gpu_reports_and_closes_nvml(fake):
    begin = time.perf_counter()
    with NvmlSampler("a", interval_s=0.001) as sampler:
        while len(sampler.samples) < 3:
            time.sleep(0.001)
        assert fake.open == 1
    assert sampler.absent is None and fake.open == 0
    assert sampler.means(begin, time.perf_counter()) == {
        "utilization_percent": 50,
        "memory_bytes": 1 << 30,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
    }
    assert sampler.throttled(begin, time.perf_counter()) == {"power cap": 1.0, "thermal (hardware)": 1.0}
    assert sampler.means(0, begin) == {}


def test_means_are_of_the_samples_in_between():
    sampler = NvmlSampler(None)
    sampler.samples = [Sample(at, {"power_w": 100.0 * at}) for at in range(5)]
    assert sampler.means(1, 3) == {"power_w": 200.0}
    sampler.samples = [Sample(at, {}, reasons=0x1 if at > 2 else 0) for at in range(5)]
    assert sampler.throttled(1, 4) == {"idle": 0.5} and sampler.throttled(7, 9) == {}


@pytest.mark.parametrize(
    ("module", "gpu", "reason"),
    [
        (None, "a", "no NVML"),
        (FakeNvml(fails=True), "a", "no NVML"),
        (FakeNvml(), "b", "does not know GPU-b"),
        (FakeNvml(), None, "no GPU"),
    ],
)
def test_absence_is_a_reason_not_an_error(monkeypatch, module, gpu, reason):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with NvmlSampler(gpu) as sampler:
        pass
    assert reason in sampler.absent and sampler.samples == []


def test_driver_version(fake, monkeypatch):
    assert driver_version() == "570.1" and fake.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_version() is None


def test_environment_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = capture_environment(("msgspec", "no-such-distribution"))
    assert found.gpu is None and found.compute_capability is None and set(found.packages) == {"msgspec"}
    assert isinstance(found, Environment) and b'"torch"' in to_json(found)
    assert nvml.current_gpu() is None
