"""The analysis on GPU traces made by hand, whose true figures are known."""

import pytest
from gpu_trace import LATENCY_US, LAUNCH_US, GpuTrace, union_us

from voxfuse.profiles.analyse import analyse_files
from voxfuse.profiles.tables import next_kernel
from voxfuse.profiles.trace import TraceError
from voxfuse.records import HotspotReport, from_json, to_json

SNAKE = ("reciprocal", "mul", "mul", "sin", "pow", "mul", "add")
SHAPE = [[1, 256, 8000]]


def analysed(trace, tmp_path, **options):
    [process] = analyse_files([trace.write(tmp_path / "trace.json")], **options)
    assert sum(process.tree.values()) == pytest.approx(process.wall_us)
    assert sum(process.path.values()) == pytest.approx(process.wall_us)
    assert sum(process.bubbles.values()) == pytest.approx(process.tree["bubbles"])
    report = HotspotReport(stack="", workload={}, noise=0.01, environment=None, processes=(process,))
    assert from_json(to_json(report), HotspotReport) == report
    return process


def hotspot(process, operation):
    [found] = [item for item in process.hotspots if item.operation == operation]
    return found


def gpu_bound(kernels=10, us=100.0):
    trace = GpuTrace()
    with trace.mark("voxfuse request: a"), trace.mark("voxfuse stage: generator"):
        for _ in range(kernels):
            trace.kernel("aten::conv1d", "implicit_convolve_sgemm", us, dims=SHAPE)
        trace.sync()
    return trace


def host_bound(kernels=10, us=2.0, python=20.0):
    trace = GpuTrace()
    with trace.mark("voxfuse request: a"), trace.mark("voxfuse stage: generator"):
        for _ in range(kernels):
            with trace.mark("voxfuse module: decoder.generator.resblocks.3|AdaINResBlock1"):
                trace.kernel("aten::sin", "sin_kernel", us, dims=SHAPE)
                trace.python(python)
        trace.sync()
    return trace


def test_where_the_gpu_is_the_bottleneck_kernels_are_the_critical_path(tmp_path):
    process = analysed(gpu_bound(), tmp_path)
    found = hotspot(process, "conv1d")
    assert found.gpu_us == pytest.approx(1000) and found.launches == found.calls == 10
    # all but the first dispatch, and the µs by which the synchronisation returns late
    assert found.critical_path_share * process.wall_us == pytest.approx(1000, abs=10)
    assert found.host_critical_share * process.wall_us < 20
    assert found.amdahl_ceiling == pytest.approx(1 / (1 - min(found.critical_path_share, 0.999)))
    assert found.kernel_ceiling > 20 and found.advice is None
    assert process.tree["vocoder"] == pytest.approx(1000)
    assert process.path["kernels and copies"] == pytest.approx(1000)


def test_where_the_host_is_the_bottleneck_a_faster_kernel_is_said_not_to_help(tmp_path):
    process = analysed(host_bound(), tmp_path)
    found = hotspot(process, "sin")
    # each round: 6 µs dispatch, the launch, 2 µs return, 20 µs Python; the GPU works for 2 µs of it
    assert process.tree["vocoder"] == pytest.approx(10 * 2)
    assert found.host_critical_share * process.wall_us == pytest.approx(10 * (6 + LAUNCH_US + 2 + 20), abs=35)
    assert found.kernel_ceiling < 1.02 < 5 < found.amdahl_ceiling
    assert "fewer launches (1.0 a call)" in found.advice and "captured graph" in found.advice
    assert process.bubbles["python"] > process.bubbles["dispatch"] > 0
    assert any("host-bound" in note for note in process.notes)


def test_hotspot_has_path_class_shape_and_fusion(tmp_path):
    trace = GpuTrace()
    with trace.mark("voxfuse stage: generator"):
        for block in (0, 1, 12):
            with trace.mark("voxfuse module: decoder.generator.conv_post|Conv1d"):
                trace.kernel("aten::conv1d", "cudnn_conv", 50, dims=SHAPE)
            with trace.mark(f"voxfuse module: decoder.generator.resblocks.{block}|AdaINResBlock1"):
                for name in SNAKE:
                    trace.kernel(f"aten::{name}", "vectorized_elementwise_kernel", 30, dims=SHAPE)
        trace.sync()
    process = analysed(trace, tmp_path, stack="kokoro")
    found = hotspot(process, " + ".join(SNAKE))
    assert (found.module, found.module_class) == ("decoder.generator.resblocks.*", "AdaINResBlock1")
    assert (found.calls, found.launches, found.stage) == (3, 21, "generator")
    assert found.operations == SNAKE and found.signature[0].shape == (1, 256, 8000)
    assert "adain_snake" in found.fusions and found.reason is None
    assert hotspot(process, "conv1d").reason == "unmatched: conv1d"
    assert process.hotspots[0] is found


def test_busy_time_is_the_union_over_streams_per_device(tmp_path):
    trace = GpuTrace()
    for round_ in range(5):
        trace.kernel("aten::mul", "a", 50, stream=7)
        trace.kernel("aten::mul", "b", 60, stream=13 + round_ % 2)
        trace.kernel("aten::mul", "c", 10, stream=7, device=1)
    trace.sync()
    process = analysed(trace, tmp_path)
    first, second = process.devices
    assert first.sum_us == pytest.approx(5 * 110) and second.sum_us == pytest.approx(50)
    on_first = [(e["ts"], e["ts"] + e["dur"]) for e in trace.events if e.get("cat") == "kernel" and e["pid"] == 0]
    assert first.busy_us == pytest.approx(union_us(on_first)) and first.busy_us < first.sum_us - 100
    assert (first.kernels, first.streams, second.streams) == (10, 3, 1)
    assert process.tree["other"] == pytest.approx(union_us(trace.busy))


def test_copies_and_fills_are_a_branch_of_their_own(tmp_path):
    trace = GpuTrace()
    with trace.op("aten::zero_"):
        trace.launch("Memset (Device)", 20, call="cudaMemsetAsync", cat="gpu_memset")
    trace.kernel("aten::mul", "mul", 100)
    with trace.op("aten::copy_"):
        trace.launch("Memcpy DtoH", 30, call="cudaMemcpyAsync", cat="gpu_memcpy", blocking=True)
    trace.python(40)
    process = analysed(trace, tmp_path)
    assert process.tree["copy"] == pytest.approx(50) and process.tree["other"] == pytest.approx(100)
    assert process.launches == {"cudaMemsetAsync": 1, "cudaLaunchKernel": 1, "cudaMemcpyAsync": 1}
    # the copy blocks: what follows on the host waits for it, and it for the kernel
    assert process.path["kernels and copies"] == pytest.approx(150)


def test_time_between_requests_is_the_queue(tmp_path):
    trace = GpuTrace()
    for name in "ab":
        with trace.mark(f"voxfuse request: {name}"):
            trace.kernel("aten::mul", "mul", 10)
            trace.sync()
        trace.python(500)
    process = analysed(trace, tmp_path)
    assert process.steps == 2 and process.tree["queue"] == pytest.approx(500)


def test_triton_launches_without_operation_take_the_annotation(tmp_path):
    trace = GpuTrace()
    with trace.mark("voxfuse stage: generator"), trace.mark("voxfuse module: g.resblocks.0|AdaINResBlock1"):
        trace.triton("_streaming_kernel", 40)
        trace.triton("_fused_snake_fwd", 40)
    trace.sync()
    process = analysed(trace, tmp_path)
    [found] = process.hotspots
    assert found.operations == ("triton:_streaming_kernel", "triton:_fused_snake_fwd")
    assert found.module == "g.resblocks.*" and "adain_snake" in found.fusions
    assert found.reason == "runs already: adain"


def test_kernels_of_others_are_deferred_and_small_ones_below_noise(tmp_path):
    trace = GpuTrace()
    with trace.mark("step"):
        trace.triton("snake_beta_kernel", 500)
        trace.kernel("aten::conv1d", "conv", 500)
        trace.kernel("aten::cumsum", "cumsum", 1)
    trace.sync()
    process = analysed(trace, tmp_path)
    assert hotspot(process, "triton:snake_beta_kernel").reason == "deferred: stack has its own (snake_beta_kernel)"
    assert process.hotspots[0].stage == "step"
    tiny = analysed(trace, tmp_path, noise=0.1)
    assert hotspot(tiny, "cumsum").reason == "no fusion: below noise"


def test_what_runs_beside_the_path_is_said_to_be_off_it(tmp_path):
    trace = GpuTrace()
    for _ in range(5):
        trace.kernel("aten::relu", "beside", 40, stream=9)
        trace.kernel("aten::mul", "main", 200, stream=7)
    trace.sync()
    found = hotspot(analysed(trace, tmp_path), "relu + mul + relu + mul + relu + mul + relu + mul + relu + mul")
    assert found.gpu_us == pytest.approx(1200)  # no module marks: one chain
    with_marks = GpuTrace()
    for _ in range(5):
        with with_marks.mark("voxfuse module: side|Side"):
            with_marks.kernel("aten::relu", "beside", 400, stream=9)
        with with_marks.mark("voxfuse module: main|Main"):
            with_marks.kernel("aten::mul", "main", 2000, stream=7)
    with_marks.sync()
    process = analysed(with_marks, tmp_path)
    assert hotspot(process, "relu").advice.startswith("off the critical path")
    assert hotspot(process, "mul").critical_path_share > 0.9


@pytest.mark.parametrize(
    "name", ["cudaStreamBeginCapture", "cudaGraphInstantiateWithFlags", "cuModuleLoadData", "cudaStreamEndCapture"]
)
def test_a_trace_with_capture_or_compilation_is_refused(tmp_path, name):
    trace = host_bound()
    trace.add("cuda_runtime", name, trace.now, 10, correlation=9)
    with pytest.raises(TraceError, match=f"not steady.*{name} 1×"):
        analysed(trace, tmp_path)
    trace = host_bound()
    trace.add("user_annotation", "compile_fx_inner (dynamo_timed)", trace.now, 10)
    with pytest.raises(TraceError, match="not steady"):
        analysed(trace, tmp_path)


def test_calls_of_compiled_regions_are_steady(tmp_path):
    trace = GpuTrace()
    with trace.mark("Torch-Compiled Region: 0/0"), trace.mark("## Call CompiledFxGraph fabc ##"):
        trace.triton("triton_poi_fused_add_mul_0", 100)
    trace.sync()
    [found] = analysed(trace, tmp_path).hotspots
    assert found.reason.startswith("deferred") and "triton_poi_fused_add_mul_0" in found.reason


def test_latency_of_a_launch_is_counted_once(tmp_path):
    trace = GpuTrace()
    trace.kernel("aten::mul", "mul", 100)
    trace.sync()
    process = analysed(trace, tmp_path)
    # dispatch 6, launch call 4 of which the kernel began after 3; then the kernel, and 1 µs of late return
    assert process.wall_us == pytest.approx(6 + LATENCY_US + 100 + 1)
    assert process.path["kernels and copies"] == pytest.approx(100)
    assert process.path["host: dispatch"] == pytest.approx(6)


def test_the_next_kernel_to_write_is_one_that_would_help(tmp_path):
    trace = GpuTrace()
    for _ in range(40):
        with trace.mark("voxfuse module: text|Text"):
            trace.kernel("aten::cos", "cos", 2)  # the host takes six times as long
            trace.sync()
    for _ in range(4):
        with trace.mark("voxfuse module: flow|Flow"):
            trace.kernel("aten::tanh", "tanh", 60)
        with trace.mark("voxfuse module: bigvgan|Snake"):
            trace.triton("snake_fwd", 300)
    trace.sync()
    process = analysed(trace, tmp_path)
    assert process.hotspots[0].operation == "triton:snake_fwd" and process.hotspots[0].reason.startswith("deferred")
    assert hotspot(process, "cos").critical_path_share > hotspot(process, "tanh").critical_path_share
    assert next_kernel(process) == hotspot(process, "tanh")
