"""The trace reader: what torch writes, what is missing, broken or hostile, and how fast a big file goes."""

import gzip
import json
import os
import subprocess
import sys

import pytest
import torch
from big_trace import write_big
from gpu_trace import GpuTrace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from voxfuse.profiles import trace_stream
from voxfuse.profiles.analyse import analyse_files
from voxfuse.profiles.join import calls_of, join
from voxfuse.profiles.trace import TraceError, load


def small():
    trace = GpuTrace()
    with trace.mark("step"):
        for _ in range(3):
            trace.kernel("aten::mul", "mul_kernel", 10, dims=[[2, 3]])
        trace.triton("_kernel", 5)
    trace.sync()
    return trace


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.pt.trace.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_plain_and_gzipped_in_every_layout(tmp_path, name, indent):
    trace = load(small().write(tmp_path / name, indent))
    assert trace.label == "a"
    assert (len(trace.device), len(trace.ops), len(trace.calls), len(trace.marks)) == (4, 3, 5, 1)
    assert trace.signature(0)[0].shape == (2, 3) and trace.signature(0)[0].dtype == "float32"
    assert trace.counts == {"read": 18, "unreadable": 0, "unplaced": 0}


def test_a_bare_list_of_events(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(small().events))
    assert len(load(path).device) == 4


@pytest.mark.parametrize("chunk", [64, 1000, 4096])
def test_any_chunk_size_gives_the_same_events(tmp_path, monkeypatch, chunk):
    trace = small()
    with trace.op('a "quoted}, {" name \\'):
        pass
    trace.events[-1]["args"]["odd"] = [{"a": 1}, {"b": [{}, {}]}]
    path = trace.write(tmp_path / "a.json")
    whole = load(path)
    monkeypatch.setattr(trace_stream, "CHUNK_BYTES", chunk)
    pieces = load(path)
    assert pieces.counts == whole.counts and pieces.names == whole.names
    assert (pieces.device.begin == whole.device.begin).all() and (pieces.ops["name"] == whole.ops["name"]).all()


def test_runtime_and_driver_launches_join_by_correlation(tmp_path):
    trace = load(small().write(tmp_path / "a.json"))
    names = [trace.names[trace.calls["name"][call]] for call in calls_of(trace)]
    assert names == ["cudaLaunchKernel"] * 3 + ["cuLaunchKernelEx"]


def test_a_correlation_used_twice_joins_the_call_before_the_kernel(tmp_path):
    first, second = small(), GpuTrace(base=5_000.0, tid=4002)
    second.kernel("aten::add", "add_kernel", 10)
    first.events += second.events  # both begin to count at 101
    trace = load(first.write(tmp_path / "a.json"))
    joined = join(trace)
    lanes = [trace.lanes[trace.calls["lane"][call]].thread for call in joined.call]
    assert lanes == ["4001"] * 4 + ["4002"]


def test_missing_and_odd_fields_are_counted_not_fatal(tmp_path):
    trace = small()
    kernel = next(event for event in trace.events if event["cat"] == "kernel")
    odd = [
        {"ph": "X"},
        {},
        {"ph": "X", "cat": "kernel", "name": "no times"},
        {"ph": "X", "cat": "kernel", "name": "negative", "ts": 5, "dur": -1},
        {"ph": "X", "cat": "kernel", "name": "no args", "ts": 1100, "dur": 1, "pid": "gpu 0", "tid": "stream 7"},
        {"ph": "X", "cat": "kernel", "name": 5, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "text for a number", "ts": "x", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "big", "ts": 1, "dur": 1, "args": {"correlation": 10**30}},
        {"ph": "X", "cat": "cpu_op", "name": "shapes", "ts": 1, "dur": 1, "args": {"Input Dims": "none"}},
        {"ph": "X", "cat": "cpu_op", "name": "null args", "ts": 1, "dur": 1, "args": None},
        {**kernel, "args": {**kernel["args"], "stream": "7"}},
    ]
    trace.events += odd
    read = load(trace.write(tmp_path / "a.json"))
    assert read.counts["unreadable"] == 3 and read.counts["unplaced"] == 2
    assert len(read.device) == 4 + 2 and len(read.ops) == 3 + 2
    [process] = analyse_files([tmp_path / "a.json"])
    assert any("left out" in note for note in process.notes)
    assert any("no launch in the trace" in note for note in process.notes)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_says_so(tmp_path, suffix, share):
    path = small().write(tmp_path / f"a{suffix}")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceError, match=r"cut short|no list traceEvents"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no list traceEvents"),
        (b"hello", "no list traceEvents"),
        (b"{}", "no list traceEvents"),
        (b'{"traceEvents": 5}', "no list traceEvents"),
        (b'{"nested": {"traceEvents": []}}', "no list traceEvents"),
        (b'{"traceEvents": []}', "no kernel and no operation"),
        (b"[]", "no kernel and no operation"),
        (b'{"traceEvents": [1, "a", null, [], {}]}', "no kernel and no operation"),
        (b'{"traceEvents": [{}] garbage', "not a whole trace"),
        (b"[{}] garbage", "something follows"),
        (b'{"traceEvents": [' + b"[" * 100_000, "not a"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}", "not a"),
        (b'{"traceEvents": [{"name": "a" bad "quoting"}, {"name": "b"}]}', "not a whole trace"),
        (b'{"traceEvents": [{"name": "\xff\xfe", "ph": "X", "cat": "kernel", "ts": 1}]}', "not UTF-8"),
        (b"\x1f\x8bnot gzip at all", "gzip file is broken"),
        (gzip.compress(b"x" * 100, mtime=0)[:-3], "gzip file is broken"),
    ],
)
def test_hostile_files_end_with_a_clear_error(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load(path)


def test_an_event_without_end_and_a_bomb_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_stream, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(trace_stream, "LONGEST_BYTES", 1 << 20)
    monkeypatch.setattr(trace_stream, "MOST_BYTES", 8 << 20)
    path = tmp_path / "a.json"
    path.write_bytes(b'{"traceEvents": [{"name": "' + b"a" * (3 << 20))
    with pytest.raises(TraceError, match="no end of an event within 1 MiB"):
        load(path)
    bomb = tmp_path / "b.json.gz"
    bomb.write_bytes(gzip.compress(b"[" + b'{"ph": "X"}, ' * (1 << 20)))
    with pytest.raises(TraceError, match="GiB unpacked"):
        load(bomb)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_anywhere_never_crashes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "a.json"
    text = bytearray(small().write(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=12))
    path.write_bytes(bytes(text))
    try:
        analyse_files([path])
    except TraceError as error:
        assert str(path) in str(error) or path.stem in str(error)


def test_agrees_with_torchs_own_averages(tmp_path):
    """Calls, total and self time of every operation, from the trace, against torch.profiler's own table."""
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), torch.nn.InstanceNorm1d(8), torch.nn.Conv1d(8, 4, 1))
    activities = [ProfilerActivity.CPU]
    with torch.no_grad(), profile(activities=activities, record_shapes=True, acc_events=True) as recorded:
        for frames in (50, 60, 70):
            model(torch.randn(2, 4, frames))
    path = tmp_path / "a.json.gz"
    recorded.export_chrome_trace(str(path))
    trace = load(path)
    totals: dict[str, list[float]] = {}
    for name, begin, end in zip(trace.ops["name"], trace.ops.begin, trace.ops.end, strict=True):
        entry = totals.setdefault(trace.names[name], [0, 0.0])
        entry[0] += 1
        entry[1] += end - begin
    averages = {item.key: item for item in recorded.key_averages()}
    assert totals.keys() == {name for name in averages if name.startswith("aten::")}
    for name, (calls, total) in totals.items():
        assert calls == averages[name].count
        assert total == pytest.approx(averages[name].cpu_time_total, abs=0.01 * calls + 0.01)
    [process] = analyse_files([path])
    convolutions = [item for item in process.hotspots if item.operation == "conv1d"]
    assert sum(item.calls for item in convolutions) == averages["aten::conv1d"].count
    assert sum(item.host_us for item in convolutions) == pytest.approx(averages["aten::conv1d"].cpu_time_total, abs=1)


@pytest.mark.slow
def test_200_megabytes_within_20_seconds_and_memory(tmp_path):
    path = tmp_path / "big.json"
    operations = write_big(path, 200_000_000)
    code = (
        "import re, sys, time; from pathlib import Path\n"
        "from voxfuse.profiles.analyse import analyse_files\n"
        "begin = time.process_time()\n"
        "[process] = analyse_files([Path(sys.argv[1])])\n"
        "spent = time.process_time() - begin\n"
        "kilobytes = re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1]\n"
        "peak = int(kilobytes) * 1024\n"  # ru_maxrss would be that of the process that forked, if that is more
        "print(spent, peak, process.events['device events'], process.hotspots[0].calls)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment, check=True
    )
    spent, peak, events, calls = map(float, done.stdout.split())
    assert spent < 20 and peak < 1.0e9
    assert events == operations and calls == operations / 5  # "mul" is two of the ten
