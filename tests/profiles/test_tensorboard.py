"""The log folder loads in torch-tb-profiler's own loader, where that is installed."""

import gzip
import json

import pytest
from gpu_trace import GpuTrace

from voxfuse.profiles.tensorboard import export


def gpu_work():
    trace = GpuTrace()
    with trace.mark("ProfilerStep#1"):
        for _ in range(4):
            trace.kernel("aten::mul", "mul_kernel", 100, dims=[[2, 3]])
            trace.triton("triton_kernel", 50)
        trace.sync()
    return trace


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_launches_are_named_as_the_plugin_knows_them(tmp_path, suffix):
    path = export(gpu_work().write(tmp_path / f"trace{suffix}"), tmp_path / "log")
    assert path.name == "trace.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    categories = [event.get("cat") for event in events]
    assert categories.count("runtime") == 9 and categories.count("kernel") == 8
    assert not {"cuda_runtime", "cuda_driver"} & set(categories)


def test_the_plugins_own_loader_finds_kernels_and_operations(tmp_path):
    pytest.importorskip("torch_tb_profiler", reason="needs the extra 'tensorboard'")
    from torch_tb_profiler import io
    from torch_tb_profiler.profiler.loader import RunLoader

    export(gpu_work().write(tmp_path / "trace.json.gz"), tmp_path / "log")
    with io.Cache() as cache:
        run = RunLoader("run", str(tmp_path / "log"), cache).load()
    [profile] = run.get_profiles(worker="trace")
    kernels = {row[0]: row for row in profile.kernel_table["data"]["rows"]}
    assert {"mul_kernel", "triton_kernel"} <= kernels.keys()
    assert "aten::mul" in json.dumps(profile.operation_table_by_name)
