"""The table of launch options: what is found for which GPU, what a table may not hold, and that writing keeps it."""

from __future__ import annotations

import json

import pytest
import torch

from voxfuse.kernels import _tuned
from voxfuse.kernels._tuned import Row, capability_of, lookup, options, read, trying, write
from voxfuse.kernels.adain import OPERATION, RESIDENT_FRAMES, shape_class

CPU = torch.device("cpu")


def test_every_shape_class_of_adain_has_options_on_every_gpu():
    for frames in (2, 127, 128, 129, 1000, 4096, RESIDENT_FRAMES, RESIDENT_FRAMES + 1, 10**6):
        for capability in (None, "7.5", "9.0", "12.0", "gfx942"):
            found = dict(lookup(OPERATION, shape_class(frames), capability))
            assert found["num_warps"] in (1, 2, 4, 8, 16, 32)


def test_a_row_of_the_gpu_outranks_the_row_of_all():
    name = shape_class(RESIDENT_FRAMES)
    assert dict(lookup(OPERATION, name, "9.0")) == {"num_warps": 8, "maxnreg": 80}
    assert dict(lookup(OPERATION, name, "gfx90a")) == {"num_warps": 8} == dict(options(OPERATION, name, CPU))
    with pytest.raises(KeyError, match="shape class 'odd'"):
        lookup(OPERATION, "odd", "9.0")


def test_rocm_is_told_by_its_architecture(monkeypatch):
    """torch gives an MI250 the capability (9, 0), an H200's."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = type("Properties", (), {"gcnArchName": "gfx90a:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert capability_of(torch.device("cuda", 0)) == "gfx90a"
    assert capability_of(CPU) is None


def test_trying_lasts_as_long_as_its_block():
    before = options(OPERATION, "streaming", CPU)
    with pytest.raises(RuntimeError), trying(OPERATION, "streaming", CPU, {"num_warps": 4}):
        assert dict(options(OPERATION, "streaming", CPU)) == {"num_warps": 4}
        raise RuntimeError
    assert options(OPERATION, "streaming", CPU) == before
    with trying(OPERATION, "another", CPU, {"num_warps": 1}):
        assert options(OPERATION, "another", CPU) == (("num_warps", 1),)
    with pytest.raises(KeyError):
        options(OPERATION, "another", CPU)


def row(**changes):
    return Row(**({"operation": "a", "shape_class": "b", "compute_capability": "9.0", "options": {}} | changes))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [row(compute_capability="*", options={"maxnreg": 80})],
            "positive num_warps, num_stages, .*, got maxnreg",
        ),
        ([row(options={"num_warps": 0})], "expected positive"),
        ([row(options={"cache": 1})], "got cache"),
        ([row(), row()], "twice"),
    ],
)
def test_a_table_that_cannot_be_obeyed_is_refused(rows, message, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_bytes(_tuned.msgspec.json.encode(rows))
    with pytest.raises(ValueError, match=message):
        read(path)


def test_writing_adds_and_replaces_and_never_leaves_a_broken_table(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_bytes(_tuned.PATH.read_bytes())
    write([row(options={"num_warps": 2}, measured={"gpu": "H200"})], path)
    write([row(options={"num_warps": 4})], path)
    assert read(path) == read() | {("a", "b", "9.0"): row(options={"num_warps": 4})}
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + len(read(path)) and json.loads(path.read_text())
    with pytest.raises(ValueError, match="got odd"):
        write([row(options={"odd": 1})], path)
    assert path.read_text().splitlines() == lines


def test_the_shipped_table_is_as_it_would_be_written(tmp_path):
    path = tmp_path / "tuned.json"
    write(read().values(), path)
    assert path.read_bytes() == _tuned.PATH.read_bytes()
