"""The fixture that ``scripts/gpu_profile.py`` cuts from a trace: small, nobody's names, and the same analysis."""

import gzip
import json

import gpu_profile
import pytest
from gpu_trace import GpuTrace

from voxfuse.profiles.analyse import analyse_files


def two_requests():
    trace = GpuTrace()
    trace.python(100)
    for name in ("voxfuse request: a", "voxfuse request: b"):
        with trace.mark(name), trace.mark("voxfuse stage: generator"):
            for _ in range(5):
                trace.kernel("aten::mul", "mul_kernel", 50, dims=[[2, 3]])
            trace.triton("_kernel", 20)
            trace.sync()
    return trace


def test_the_first_request_is_kept_and_analysed_alike(tmp_path):
    path = two_requests().write(tmp_path / "trace.json.gz")
    size = gpu_profile.trim(path, tmp_path / "cut.json.gz")
    assert size == (tmp_path / "cut.json.gz").stat().st_size < gpu_profile.MOST_BYTES
    document = json.loads(gzip.decompress((tmp_path / "cut.json.gz").read_bytes()))
    assert "distributedInfo" not in document and "host_name" not in document
    assert {event["pid"] for event in document["traceEvents"]} == {0, 1}  # the device and one process
    [whole], [cut] = analyse_files([path]), analyse_files([tmp_path / "cut.json.gz"])
    assert (whole.steps, cut.steps) == (2, 1)
    assert cut.tree["vocoder"] == pytest.approx(whole.tree["vocoder"] / 2)
    assert cut.hotspots[0].operations == whole.hotspots[0].operations
    assert cut.hotspots[0].signature == whole.hotspots[0].signature
    assert cut.events["with their launch"] == cut.events["device events"] == 6


def test_a_long_request_is_cut_by_time(tmp_path):
    path = two_requests().write(tmp_path / "trace.json.gz")
    gpu_profile.trim(path, tmp_path / "cut.json.gz", stop_us=120.0)
    [cut] = analyse_files([tmp_path / "cut.json.gz"])
    assert cut.events["device events"] == 2
