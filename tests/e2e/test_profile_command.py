"""``voxfuse profile`` and ``voxfuse hotspots``: what they write, print and refuse."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from gpu_trace import GpuTrace
from tone_stack import TEXTS, ToneStack
from typer.testing import CliRunner

from voxfuse.__main__ import app
from voxfuse.e2e import profile_command
from voxfuse.e2e.stack import WeightsMissing
from voxfuse.fusions import graph_runner
from voxfuse.profiles import report
from voxfuse.profiles.capture import Stage
from voxfuse.records import HotspotReport, from_json

LOOP = """
import pathlib, sys, time, torch
class Block(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x * 3) + x
block, x, end = Block(), torch.randn(1, 8, 64), time.monotonic() + 100
while time.monotonic() < end and not list(pathlib.Path(sys.argv[1]).glob("*trace-*")):
    block(x)
"""


@pytest.fixture
def stack(monkeypatch):
    stack = ToneStack()
    stack.stages = (Stage("text", "tokenizer"),)
    monkeypatch.setattr(profile_command, "driver", lambda name: stack)
    monkeypatch.setattr(profile_command, "load_texts", lambda limit: list(TEXTS[:limit]))
    return stack


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_stack_is_profiled_into_trace_record_and_page(stack, tmp_path):
    result = run("profile", "--stack", "tones", "--device", "cpu", "--sentences", 3, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = from_json(result.stdout, HotspotReport)
    assert found == from_json((tmp_path / "hotspots.json").read_bytes(), HotspotReport)
    [process] = found.processes
    assert (process.steps, process.device, found.workload["texts"]) == (3, "cpu", 3)
    assert sum(process.tree.values()) == pytest.approx(process.wall_us)
    assert process.tree["tokenizer"] > 0 and "text" in {stage.name for stage in process.stages}
    assert any("sin" in item.operations for item in process.hotspots)
    assert found.overhead["ratio"] == pytest.approx(found.overhead["profiled_s"] / found.overhead["plain_s"])
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    marks = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"voxfuse request: t000", "voxfuse stage: text", "voxfuse module: |Tones"} <= marks
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "profile overhead" in page  # no launches on a CPU


def test_hooks_are_gone_afterwards_and_the_table_is_printed(stack, tmp_path):
    result = run("profile", "--stack", "tones", "--device", "cpu", "--sentences", 1, "--out", tmp_path)
    assert result.exit_code == 0 and "T_total" in result.stdout and "profile overhead" in result.stdout
    assert not stack.model._forward_hooks and not stack.model._forward_pre_hooks


@pytest.mark.slow
def test_a_command_is_profiled_without_a_change_to_it(tmp_path):
    options = ("--skip", 1, "--record", 1.5, "--tensorboard", "--json", "--out", tmp_path)
    result = run("profile", *options, "--", sys.executable, "-c", LOOP, tmp_path)
    assert result.exit_code == 0, result.output
    found = from_json(result.stdout, HotspotReport)
    [process], rates = found.processes, found.overhead
    assert (
        rates["ratio"] == rates["plain_calls_per_s"] / rates["profiled_calls_per_s"] and rates["plain_calls_per_s"] > 10
    )
    chain = max(process.hotspots, key=lambda item: item.calls)
    assert chain.operations == ("mul", "sin", "add") and chain.module_class == "Block"
    assert len(list((tmp_path / "tensorboard").glob("*.pt.trace.json.gz"))) == 1


def test_a_command_that_leaves_no_trace_ends_with_2(tmp_path):
    result = run("profile", "--skip", 0, "--out", tmp_path, "--", sys.executable, "-c", "print('no torch')")
    assert result.exit_code == 2 and "no process of the command left a trace" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --stack NAME or, after --, a command"),
        (("--stack", "tones", "--", "ls"), "give either"),
        (("--stack", "tones", "--device", "cuda"), "use --device cpu"),
        (("--stack", "tones", "--device", "banana"), "expected cpu, cuda or cuda:N"),
        (("--stack", "tones", "--out", __file__), "is a file"),
        (("--stack", "tones", "--sentences", "0"), "sentences"),
    ],
)
def test_usage_ends_with_2(stack, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("profile", "--out", tmp_path, *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


def test_graphs_are_captured_while_warming_up_and_not_in_the_trace(stack, tmp_path, monkeypatch):
    asked, speak = [], stack.synthesize

    def synthesize(text, seed):
        asked.append(graph_runner.capture_asked())
        return speak(text, seed)

    monkeypatch.setattr(stack, "synthesize", synthesize)
    result = run("profile", "--stack", "tones", "--device", "cpu", "--sentences", 2, "--out", tmp_path, "--no-page")
    assert result.exit_code == 0, result.output
    assert asked[:2] == [True, True] and len(asked) > 2 and not any(asked[2:])


def test_what_is_missing_ends_with_2(stack, tmp_path, monkeypatch):
    def load(*_):
        raise WeightsMissing("install these weights")

    monkeypatch.setattr(stack, "load", load)
    result = run("profile", "--stack", "tones", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 2 and "install these weights" in result.stderr
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    result = run("profile", "--stack", "tones", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 2 and "pip install 'voxfuse[profile]'" in result.stderr


def test_without_a_page_matplotlib_is_not_needed(stack, tmp_path, monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    result = run("profile", "--stack", "tones", "--device", "cpu", "--sentences", 1, "--out", tmp_path, "--no-page")
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json.gz", "hotspots.json"}


def hostile_names():
    trace = GpuTrace()
    with trace.mark("<script>alert(1)</script>"):
        trace.kernel("aten::<b>mul</b>", "[red]kernel", 100)
    trace.sync()
    return trace


def test_hotspots_of_traces_as_table_json_and_page(tmp_path):
    path = hostile_names().write(tmp_path / "a.json")
    table = run("hotspots", path, "--out", tmp_path / "out")
    assert table.exit_code == 0 and "<script>" in table.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and page.count("base64,") == 4
    found = from_json(run("hotspots", path, path, "--json", "--noise", 0.5).stdout, HotspotReport)
    assert len(found.processes) == 2 and found.noise == 0.5


@pytest.mark.parametrize(
    ("content", "message"), [(b"{}", "no list traceEvents"), (b'{"traceEvents": [{"ph": "X"', "cut short")]
)
def test_broken_traces_end_with_2(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    result = run("hotspots", path)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
    assert run("hotspots", tmp_path / "absent.json").exit_code == 2
    assert run("hotspots").exit_code == 2


@pytest.mark.slow
@pytest.mark.weights
def test_kokoro_on_a_cpu_end_to_end(tmp_path: Path):
    result = run("profile", "--stack", "kokoro", "--device", "cpu", "--sentences", 1, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    [process] = from_json(result.stdout, HotspotReport).processes
    stages = {stage.name: stage.component for stage in process.stages if stage.name}
    assert stages == {"text": "tokenizer", "decoder": "vocoder", "generator": "vocoder"}
    assert process.tree["vocoder"] > process.tree["tokenizer"] > 0
    snake = [item for item in process.hotspots if item.operations[:2] == ("reciprocal", "mul")]
    # 8 AdaIN + Snake blocks of 6 Snakes each
    assert sum(item.calls for item in snake) == 48
    assert all("adain_snake" in item.fusions and item.signature[0].dtype == "float32" for item in snake)
