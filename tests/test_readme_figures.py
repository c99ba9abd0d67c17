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


def test_gate_table():
    """One row for every full gate that passed: fusions, speed with its interval, latency, memory, WER, fidelity."""
    rows = re.findall(r"^\| (`[^|]+`) \| (.+) \|$", section(), re.MULTILINE)
    gates = [
        record
        for record in RECORDS
        if isinstance(record, GateVerdict) and record.protocol == "full" and record.verdict == "pass"
    ]
    assert len(rows) == len(gates) and len(gates) >= 1
    for names, figures in rows:
        (verdict,) = (gate for gate in gates if gate.fusions == tuple(re.findall(r"`(\w+)`", names)))
        assert figures == figures_of(verdict)
        assert f"{len(verdict.utterances)} sentences" in section()
        assert verdict.environment.gpu == "NVIDIA H200" and verdict.environment.torch in section()


def figures_of(verdict):
    metrics = {metric.name: metric for metric in verdict.metrics}
    speed, latency, memory = (metrics[n] for n in ("throughput ratio a/b", "latency p50", "peak GPU memory"))
    wer, snr = metrics["corpus WER"], metrics["SNR, median"]
    return " | ".join(
        (
            f"{speed.patched:.2f}× [{1 + speed.low:.2f}, {1 + speed.high:.2f}]",
            f"{1e3 * latency.baseline:.1f} → {1e3 * latency.patched:.1f} ms",
            f"{memory.baseline / 1e9:.2f} → {memory.patched / 1e9:.2f} GB",
            f"{wer.baseline:.2f} → {wer.patched:.2f} %",
            f"{snr.patched:.1f} dB",
        )
    )
