"""Every figure in the README's section "Measured" comes from a record in the ledger."""

import re
import statistics
from pathlib import Path

from voxfuse.evidence import ledger
from voxfuse.records import GateVerdict, MicroVerdict, read

README = Path(__file__).resolve().parents[1] / "README.md"
RECORDS = [read(path) for path in sorted((Path(ledger.__file__).parent / "records").rglob("*.json"))]


def section() -> str:
    return README.read_text(encoding="utf-8").split("## Measured")[1].split("\n## ")[0]


def test_micro_table():
    rows = re.findall(r"\| (\d+) × (\d+) .*?\| (\d) \| ([\d.]+) µs \| ([\d.]+)× \| ([\d.]+)× \|", section())
    assert len(rows) >= 5
    verdicts = [record for record in RECORDS if isinstance(record, MicroVerdict) and record.fusion == "adain_snake"]
    for channels, frames, count, gpu_us, eager, compiled in rows:
        shape = (int(count), int(channels), int(frames))
        (verdict,) = (verdict for verdict in verdicts if verdict.case.tensors["x"].shape == shape)
        ratios = {ratio.baseline: ratio.median for ratio in verdict.ratios}
        ours = statistics.median(next(arm.gpu_us for arm in verdict.arms if arm.name == "voxfuse"))
        assert (f"{ours:.1f}", f"{ratios['eager']:.2f}", f"{ratios['compile']:.2f}") == (gpu_us, eager, compiled)
        assert verdict.environment.gpu == "NVIDIA H200" and verdict.environment.torch in section()


def test_gate_figures():
    (verdict,) = (record for record in RECORDS if isinstance(record, GateVerdict) and record.protocol == "full")
    metrics = {metric.name: metric for metric in verdict.metrics}
    speed, latency, memory = (metrics[n] for n in ("throughput ratio a/b", "latency p50", "peak GPU memory"))
    text = " ".join(section().split())
    assert verdict.verdict == "pass"
    low, high = 1 + speed.low, 1 + speed.high
    assert f"throughput {speed.patched:.2f}× [{low:.2f}, {high:.2f}]" in text
    assert f"median latency {1e3 * latency.baseline:.1f} → {1e3 * latency.patched:.1f} ms" in text
    assert f"peak GPU memory +{100 * (memory.patched / memory.baseline - 1):.1f} %" in text
    assert f"{len(verdict.utterances)} sentences" in text
    assert f"corpus WER {metrics['corpus WER'].patched:.2f} % in both arms" in text
    assert metrics["corpus WER"].baseline == metrics["corpus WER"].patched
    assert metrics["utterances whose edits differ"].patched == 0
    assert f"untouched {metrics['SNR, median'].patched:.1f} dB" in text
