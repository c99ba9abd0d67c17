"""Marks of modules and stages: where they stand, also around exceptions, and that they go away."""

import pytest
import torch
from torch import nn

from voxfuse.profiles import capture, marks
from voxfuse.profiles.capture import Stage, marked
from voxfuse.profiles.trace import load


class Voice(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(4, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh())

    def forward(self, x):
        return self.decoder(self.text(x))


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("no")


STAGES = (Stage("text", "tokenizer"), Stage("decoder", "vocoder", "decoder"))
CPU = torch.device("cpu")


def recorded(tmp_path, model, serve, stages=STAGES):
    path = tmp_path / "trace.json"
    with torch.no_grad(), marked(model, stages):
        recording = capture.record([("a", serve), ("b", serve)], CPU, path, "text")
    assert len(recording.walls_s) == len(recording.starts) == 2
    return load(path)


def test_every_call_of_a_module_is_marked_with_path_and_class(tmp_path):
    model = Voice().eval()
    trace = recorded(tmp_path, model, lambda: model(torch.ones(1, 4)))
    names = [trace.names[name] for name in trace.marks["name"]]
    assert sorted(name for name in names if name.startswith(marks.MODULE)) == sorted(
        2
        * [
            f"voxfuse module: {name}"
            for name in (
                "|Voice",
                "text|Linear",
                "decoder|Sequential",
                "decoder.0|Sequential/Linear",
                "decoder.2|Sequential/Tanh",
            )
        ]
    )
    assert names.count("voxfuse stage: decoder") == names.count("voxfuse stage: text") == 2
    begin, end = trace.marks.begin, trace.marks.end
    of = {name: index for index, name in enumerate(names)}
    outer, inner = of["voxfuse stage: decoder"], of["voxfuse module: decoder.2|Sequential/Tanh"]
    assert begin[outer] <= begin[inner] and end[inner] <= end[outer]


def test_parts_of_a_module_whose_own_forward_does_not_run_are_inside_of_it(tmp_path):
    model = Voice().eval()
    trace = recorded(tmp_path, model, lambda: model.decoder[0](torch.ones(1, 4)))
    mark = next(name for name in trace.names if name.startswith("voxfuse module: decoder.0"))
    assert marks.enter(mark, marks.Context()).classes == ("Sequential", "Linear")
    assert marks.enter(mark, marks.Context(classes=("Voice", "Sequential"))).classes == (
        "Voice",
        "Sequential",
        "Linear",
    )


def test_a_module_that_raises_closes_its_mark(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Fails()).eval()

    def serve():
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(1, 4))
        model[0](torch.ones(1, 4))

    trace = recorded(tmp_path, model, serve, ())
    names = [trace.names[name] for name in trace.marks["name"]]
    whole, alone = names.index("voxfuse module: |Sequential"), names.index("voxfuse module: 1|Fails")
    linear = [index for index, name in enumerate(names) if name == "voxfuse module: 0|Linear"]
    assert len(linear) == 4 and trace.marks.end[alone] <= trace.marks.end[whole]
    assert trace.marks.begin[linear[1]] >= trace.marks.end[whole]  # the later call is not inside the broken one


def test_hooks_are_removed_and_compiled_modules_are_left_alone():
    inner = Voice()
    model = nn.Sequential(torch.compile(inner))
    with marked(model):
        assert model._forward_hooks and model[0]._forward_hooks
        assert not inner.text._forward_hooks and not inner.decoder._forward_hooks
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_stages_that_do_not_fit_the_model_are_refused():
    with (
        pytest.raises(ValueError, match=r"Voice has no module vocoder"),
        marked(Voice(), (Stage("v", "vocoder", "vocoder"),)),
    ):
        pass


@pytest.mark.gpu
def test_a_gpu_trace_has_kernels_in_their_modules(tmp_path):
    from voxfuse.profiles.analyse import analyse_files

    device = torch.device("cuda")
    model = Voice().eval().to(device)
    x = torch.ones(64, 4, device=device)
    path = tmp_path / "trace.json.gz"
    with torch.no_grad(), marked(model, STAGES):
        requests = [("a", lambda: model(x)), ("b", lambda: model(x))]
        capture.run(requests, device, "text")
        capture.record(requests, device, path, "text")
    [process] = analyse_files([path], components={"decoder": "vocoder", "text": "tokenizer"})
    assert process.device == "gpu" and process.steps == 2
    [tanh] = [item for item in process.hotspots if item.operation == "tanh"]
    assert (tanh.module, tanh.module_class, tanh.stage, tanh.launches) == ("decoder.*", "Tanh", "decoder", 2)
    assert process.tree["vocoder"] > 0 and process.tree["tokenizer"] > 0
    assert sum(process.tree.values()) == pytest.approx(process.wall_us)
    assert process.events["with their launch"] == process.events["device events"]
