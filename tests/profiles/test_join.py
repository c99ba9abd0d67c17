"""Graph replays: joined with a mapping trace by kernel name and order."""

import time

from gpu_trace import GpuTrace

from voxfuse.profiles.analyse import analyse_files
from voxfuse.profiles.marks import general

LAYERS = [  # module, class, and its operations with the kernel of each
    ("talker.layers.0.norm", "RMSNorm", [("aten::pow", "pow_kernel"), ("aten::mean", "mean_kernel")]),
    ("talker.layers.0.proj", "Linear", [("aten::linear", "nvjet_gemm")]),
    ("talker.layers.1.norm", "RMSNorm", [("aten::pow", "pow_kernel"), ("aten::mean", "mean_kernel")]),
    ("talker.layers.1.mlp", "MLP", [("aten::silu", "silu_kernel"), ("aten::mul", "mul_kernel")]),
]
KERNELS = [(kernel, 20.0) for _, _, operations in LAYERS for _, kernel in operations]


def without_graphs():
    trace = GpuTrace()
    with trace.mark("execute_context_0(0)_generation_16(16)"):
        trace.kernel("aten::embedding", "embedding_kernel", 5)
        for path, kind, operations in LAYERS:
            with trace.mark(f"voxfuse module: {path}|{kind}"):
                for operation, kernel in operations:
                    trace.kernel(operation, kernel, 25, dims=[[16, 1024]])
        trace.sync()
    return trace


def replays(kernels, count=4):
    trace = GpuTrace(base=90_000.0)
    for step in range(count):
        with trace.mark(f"execute_context_0(0)_generation_{step}({step})"):
            trace.graph(kernels)
            trace.sync()
    return trace


def test_replayed_kernels_get_module_operation_and_shape_from_the_mapping(tmp_path):
    formal = replays(KERNELS).write(tmp_path / "formal.json")
    mapping = without_graphs().write(tmp_path / "mapping.json")
    [process] = analyse_files([formal], mapping=mapping)
    assert process.events["in graph replays"] == 4 * 7 == process.events["replays joined with the mapping"]
    found = {(item.module, item.operation): item for item in process.hotspots}
    norm = found["talker.layers.*.norm", "pow + mean"]
    assert norm.gpu_us == 4 * 4 * 20 and norm.calls == 4 * 2
    assert norm.signature[0].shape == (16, 1024) and norm.module_class == "RMSNorm"
    assert norm.stage == "execute_context_*(*)_generation_*(*)"
    assert found["talker.layers.*.proj", "linear"].gpu_us == 4 * 20
    assert found["talker.layers.*.mlp", "silu + mul"].launches == 0  # they cost no launch of their own
    assert process.launches == {"cudaGraphLaunch": 4}


def test_a_replay_with_kernels_that_the_mapping_lacks_keeps_the_others(tmp_path):
    kernels = [("capture_only_memset_kernel", 1.0), *KERNELS[:3], ("other_kernel", 9.0), *KERNELS[3:]]
    formal = replays(kernels).write(tmp_path / "formal.json")
    mapping = without_graphs().write(tmp_path / "mapping.json")
    [process] = analyse_files([formal], mapping=mapping)
    assert process.events["replays joined with the mapping"] == 4 * 7
    other = [item for item in process.hotspots if "other_kernel" in item.operation]
    assert [item.operation for item in other] == ["kernel:capture_only_memset_kernel + kernel:other_kernel"]
    assert sum(item.gpu_us for item in process.hotspots) == 4 * (7 * 20 + 10)


def test_without_a_mapping_replays_have_kernel_names_and_a_note(tmp_path):
    [process] = analyse_files([replays(KERNELS).write(tmp_path / "formal.json")])
    operations = {item.operation: item.gpu_us for item in process.hotspots}
    assert operations == {
        "kernel:pow_kernel + kernel:mean_kernel": 160.0,
        "kernel:nvjet_gemm": 80.0,
        "cudaGraphLaunch": 0.0,  # the host's part
        "kernel:pow_kernel + kernel:mean_kernel + kernel:silu_kernel + kernel:mul_kernel": 320.0,
    }
    assert any("--mapping" in note for note in process.notes)
    assert process.hotspots[0].reason.startswith("unmatched: kernel:pow_kernel")


def test_several_processes_are_analysed_each_by_itself(tmp_path):
    first = without_graphs().write(tmp_path / "talker.pt.trace.json.gz")
    second = replays(KERNELS).write(tmp_path / "vocoder.json")
    processes = analyse_files([first, second])
    assert [process.trace for process in processes] == ["talker", "vocoder"]
    assert processes[0].wall_us != processes[1].wall_us


def test_modules_of_a_trace_with_stacks_become_a_path(tmp_path):
    trace = GpuTrace()
    with (
        trace.mark("nn.Module: Decoder_0", "python_function"),
        trace.mark("nn.Module: AdaINResBlock1_7", "python_function"),
    ):
        with trace.mark("nn.Module: AdaIN1d_3", "python_function"):
            trace.kernel("aten::mul", "mul_kernel", 100, dims=[[1, 256, 800]])
        trace.add("python_function", "torch/nn/modules/module.py(1750): forward", trace.now - 5, 3)
    trace.sync()
    [process] = analyse_files([trace.write(tmp_path / "a.json")], stack="kokoro")
    [found] = process.hotspots
    assert (found.module, found.module_class) == ("Decoder/AdaINResBlock1/AdaIN1d", "AdaIN1d")
    assert "adain_snake" in found.fusions


def test_a_writer_that_numbers_nothing_costs_no_time(tmp_path):
    trace = GpuTrace()
    for _ in range(30_000):
        trace.kernel("aten::mul", "mul_kernel", 5)
    trace.sync()
    for event in trace.events:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] = 0
    path = trace.write(tmp_path / "a.json", indent=None)
    begin = time.process_time()
    [process] = analyse_files([path])
    assert time.process_time() - begin < 20
    assert process.events["with their launch"] == 30_000


def test_many_replays_of_a_large_graph_are_looked_up_once(tmp_path):
    mapping = GpuTrace()
    for layer in range(200):
        with mapping.mark(f"voxfuse module: layers.{layer}|Layer"):
            for kernel in ("a", "b", "c", "d", "e"):
                mapping.kernel(f"aten::{kernel}", f"{kernel}_kernel", 5)
    mapping.sync()
    formal = replays([(f"{kernel}_kernel", 5.0) for kernel in "abcde"] * 200, count=50)
    begin = time.process_time()
    [process] = analyse_files(
        [formal.write(tmp_path / "formal.json", None)], mapping=mapping.write(tmp_path / "mapping.json", None)
    )
    assert time.process_time() - begin < 20
    assert process.events["replays joined with the mapping"] == 50_000
    [found] = [item for item in process.hotspots if item.module == "layers.*"]
    assert found.operations == ("a", "b", "c", "d", "e") and found.calls == 50 * 200


def test_identifiers_in_annotations_do_not_split_stages():
    assert general("request 7f3a9c10 step 12") == general("request 12345678 step 9") == "request * step *"
    assert general("request 550e8400-e29b-41d4-a716-446655440000") == "request *"
    assert general("decoder.blocks.12.conv1") == "decoder.blocks.*.conv1"
    assert general("deadbeef generator") == "deadbeef generator"
