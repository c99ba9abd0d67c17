"""Real traces of Kokoro, cut by ``scripts/gpu_profile.py``: the fields that torch really writes.

A file ``kokoro…-gpu.json.gz`` in ``traces`` is one of a GPU; each is analysed as ``voxfuse hotspots`` does it.
"""

from pathlib import Path

import pytest

from voxfuse.profiles.analyse import analyse_files

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))


@pytest.fixture(params=TRACES, ids=lambda path: path.name)
def process(request):
    [process] = analyse_files([request.param], stack="kokoro")
    return process


def test_the_trace_is_accounted_for(process):
    assert sum(process.tree.values()) == pytest.approx(process.wall_us)
    assert sum(process.path.values()) == pytest.approx(process.wall_us, rel=1e-6)
    assert process.events["unreadable"] == process.events["unplaced"] == 0
    assert min(process.tree[part] for part in ("vocoder", "tokenizer", "bubbles")) > 0
    assert {"text", "decoder", "generator"} <= {stage.name for stage in process.stages}


def test_kernels_have_their_launches_and_chains(process):
    if process.device == "cpu":
        assert process.events["device events"] == 0
        return
    events = process.events
    assert events["with their launch"] >= 0.99 * events["device events"] > 500
    assert events["in a chain"] >= 0.99 * events["device events"]
    assert process.launches["cudaLaunchKernel"] > 500


def test_snake_chains_are_found_with_shape_and_fusion(process):
    snake = [
        item for item in process.hotspots if item.operations == ("reciprocal", "mul", "mul", "sin", "pow", "mul", "add")
    ]
    # two branches of the generator (8 blocks of 6), of which a trace cut short may lack the end
    assert {item.module for item in snake} <= {"decoder.generator.resblocks.*", "decoder.generator.noise_res.*"}
    assert 0 < sum(item.calls for item in snake) <= 48
    for item in snake:
        assert "adain_snake" in item.fusions and item.module_class == "AdaINResBlock1"
        assert item.signature[0].dtype == "float32" and item.signature[0].shape[1] in (128, 256)


def test_replays_are_counted_and_ask_for_a_mapping():
    path = TRACES[0].parent / "replays" / "kokoro-torch-2.11-gpu.json.gz"
    [process] = analyse_files([path], stack="kokoro")
    assert process.launches["cudaGraphLaunch"] == 3  # token stage, frame stage, decoder
    assert process.launches["cudaLaunchKernel"] < 50  # the source's noise, and copies
    replayed = process.events["in graph replays"]
    assert replayed > 0.95 * process.events["device events"] > 2000
    assert process.events["replays joined with the mapping"] == 0
    assert any(f"{replayed} kernels are graph replays" in note and "--mapping" in note for note in process.notes)
