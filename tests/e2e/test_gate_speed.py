"""Speed in the gate, by a clock of the test's own: pairs, noise, claims, interruption, fusions left out."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tone_gate import COUNT, Case, failed, outcomes, protocol_of, silent
from tone_stack import TEXTS, TonePatches

from voxfuse.e2e import generate as generate_module
from voxfuse.e2e.gate import generate
from voxfuse.e2e.rundir import PeakMemory, RunDirectory
from voxfuse.e2e.score import score
from voxfuse.fusions import graph_runner


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path / "run")


@pytest.fixture
def timed(case, monkeypatch):
    """``timed(patched_s, untouched_s)``: how long the stack takes, by a clock of our own with 1 % noise."""
    now, rng = [0.0], np.random.default_rng(0)

    def advance(seconds):
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], advance=advance)
    monkeypatch.setattr("voxfuse.e2e.generate.time", clock)
    speak = case.stack.synthesize

    def set_pace(patched_s, untouched_s):
        def synthesize(text, seed):
            seconds = patched_s if "forward" in vars(case.stack.model) else untouched_s
            now[0] += seconds * rng.normal(1, 0.01)
            return speak(text, seed)

        case.stack.synthesize = synthesize

    return set_pace


MANY = {"pairs": 12, "aa_pairs": 12, "claim_pairs": 10}


def test_on_a_gpu_speed_is_timed_in_pairs_and_judged(case, timed):
    timed(0.2, 0.3)
    verdict = case.verdict(declared=protocol_of(throughput=MANY), device="cuda")
    assert [block.kind for block in verdict.blocks] == ["a/a"] * 12 + ["a/b"] * 12
    assert [block.first for block in verdict.blocks[:4]] == ["baseline", "patched", "baseline", "patched"]
    assert RunDirectory.open(case.path).blocks() == verdict.blocks
    metrics = {metric.name: metric for metric in verdict.metrics}
    ratio = metrics["throughput ratio a/b"]
    assert ratio.patched == pytest.approx(1.5, abs=0.02) and 0.45 < ratio.low < 0.5 < ratio.high < 0.55
    assert metrics["throughput ratio a/a"].patched == pytest.approx(1, abs=0.01)
    assert metrics["latency p50"].baseline == pytest.approx(0.3, abs=0.01)
    judged = outcomes(verdict)
    assert judged["throughput improves"] == judged["latency p99"] == judged["RTF p50"] == "pass"
    assert verdict.verdict == "not-judged" and judged["peak GPU memory"] == "not-judged"  # it was not measured
    run = RunDirectory.open(case.path)
    run.append("memory.jsonl", [PeakMemory(arm="baseline", peak_bytes=100), PeakMemory(arm="patched", peak_bytes=103)])
    assert score(run, case.reader, silent).verdict == "pass"


def test_a_host_that_changes_its_pace_makes_no_noise(case, timed):
    """Slow for a while, then fast, each for an odd number of outputs: longer than a text, about as long as a block."""
    timed(0.2, 0.3)
    steady, spoken = case.stack.synthesize, [0]
    clock = generate_module.time.perf_counter

    def synthesize(text, seed):
        begin = clock()
        speech = steady(text, seed)
        spoken[0] += 1
        if spoken[0] // 9 % 2:
            generate_module.time.advance(0.8 * (clock() - begin))
        return speech

    case.stack.synthesize = synthesize
    declared = protocol_of(throughput=MANY | {"block_sentences": 4})
    verdict = case.verdict(declared=declared, device="cuda")
    metrics = {metric.name: metric for metric in verdict.metrics}
    noise, gain = metrics["throughput ratio a/a"], metrics["throughput ratio a/b"]
    assert noise.high - noise.low < 0.15 and gain.patched == pytest.approx(1.5, abs=0.1)
    assert outcomes(verdict)["throughput improves"] == "pass"


def test_a_slower_patch_fails(case, timed):
    timed(0.33, 0.3)
    verdict = case.verdict(declared=protocol_of(throughput=MANY), device="cuda")
    assert {"throughput improves", "latency p50", "RTF p50"} <= failed(verdict)


def test_no_gain_few_pairs_or_noise_claim_nothing(case, timed, tmp_path):
    timed(0.3, 0.3)
    same = case.verdict(declared=protocol_of(throughput=MANY), device="cuda")
    assert outcomes(same)["throughput improves"] == "inconclusive" and same.verdict == "inconclusive"
    timed(0.2, 0.3)
    case.path = tmp_path / "few"
    few = case.verdict(declared=protocol_of(throughput={**MANY, "pairs": 9}), device="cuda")
    assert outcomes(few)["throughput improves"] == "inconclusive"
    case.path = tmp_path / "noisy"
    noisy = case.verdict(declared=protocol_of(throughput={**MANY, "noise_cap": 1e-5}), device="cuda")
    assert outcomes(noisy)["throughput improves"] == outcomes(noisy)["RTF p95"] == "inconclusive"


def test_interrupted_timing_keeps_its_pairs(case, timed):
    timed(0.2, 0.3)
    declared = protocol_of(throughput=MANY)
    warmed_up, spoken, first_block = 1 + COUNT, 2 * COUNT, 2 * 2
    case.stack.breaks_at = warmed_up + spoken + first_block + 2 * 2 * 5  # in the sixth pair of a/a
    with pytest.raises(KeyboardInterrupt):
        case.speak(declared=declared, device="cuda")
    assert len(RunDirectory.open(case.path).blocks()) == 5
    case.stack.breaks_at = None
    blocks = case.speak(declared=declared, device="cuda").blocks()
    assert [(block.kind, block.index) for block in blocks] == [(k, i) for k in ("a/a", "a/b") for i in range(12)]


def test_each_fusion_is_left_out_in_turn(case, timed):
    timed(0.2, 0.3)
    left = []

    class Two(TonePatches):
        @property
        def receipts(self):
            (first,) = super().receipts
            return first, msgspec.structs.replace(first, fusion="other", target="Tones.other")

    def apply(left_out):
        left.append(left_out)
        return Two(case.stack)

    declared = protocol_of(sentences=3, throughput={**MANY, "leave_one_out_pairs": 2})
    run = generate(case.stack, apply, declared, TEXTS[:3], case.path, silent, device="cuda", backend="triton")
    assert left == [(), ("other",), ("tone",)]
    assert [block.kind for block in run.blocks()[24:]] == ["without:other"] * 2 + ["without:tone"] * 2


def test_the_patched_arm_warms_up_with_every_text_where_graphs_may_be_captured(case, timed):
    timed(0.2, 0.3)
    heard = []
    speak = case.stack.synthesize

    def synthesize(text, seed):
        heard.append((text.id, "forward" in vars(case.stack.model), graph_runner.capture_asked()))
        return speak(text, seed)

    case.stack.synthesize = synthesize
    case.speak(declared=protocol_of(sentences=3, throughput={"aa_pairs": 1, "pairs": 1}), device="cuda")
    ids = [text.id for text in TEXTS[:3]]
    shortest = min(TEXTS[:3], key=lambda text: len(text.text)).id
    assert heard[0] == (shortest, False, False)
    assert heard[1:4] == [(identity, True, True) for identity in ids]
    spoken = heard[4:10]
    assert not any(capturing for _, _, capturing in spoken)
    assert sorted(spoken) == sorted((identity, patched, False) for identity in ids for patched in (False, True))


def test_what_only_warming_up_fell_back_from_is_no_fault(case, timed):
    timed(0.2, 0.3)
    run = case.speak(declared=protocol_of(throughput=MANY), device="cuda")
    assert run.receipts()[0].calls == COUNT  # of 2 × COUNT with the warm-up
