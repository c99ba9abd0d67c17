"""What a micro record may claim: only what follows from the samples that it carries."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from verdicts import measured, samples, verdict

from voxfuse.evidence import ledger
from voxfuse.recompute import CONTROLS, inconsistency, light_us, ratio_interval, recompute
from voxfuse.records import MicroVerdict, Ratio


def arms_with(record, name, **changes):
    return tuple(msgspec.structs.replace(arm, **changes) if arm.name == name else arm for arm in record.arms)


def test_what_the_judge_writes_is_consistent_at_any_speed_noise_and_number_of_pairs():
    for eager, ours in ((20.0, 10.0), (10.0, 10.0), (8.0, 10.0)):
        record = measured(eager, ours)
        assert inconsistency(record) is None and recompute(record) == record
    for pairs in (30, 31, 50, 200):
        for seed in range(10):
            rng = np.random.default_rng(seed)
            arms = tuple(
                msgspec.structs.replace(arm, gpu_us=tuple((10 * np.exp(rng.standard_t(2, pairs) / 20)).tolist()))
                for arm in measured(10.0, 10.0).arms
            )
            assert inconsistency(recompute(verdict(arms=arms))) is None, (pairs, seed)


def test_every_shipped_record_is_consistent_and_recomputes_to_itself():
    records = [entry.verdict for entry in ledger.load([ledger.SHIPPED]) if isinstance(entry.verdict, MicroVerdict)]
    assert len(records) >= 20
    assert [inconsistency(record) for record in records] == [None] * len(records)
    assert all(recompute(record) == record for record in records[:2])  # all of them: voxfuse ledger recompute


HONEST = measured()
RATIOS = {ratio.baseline: ratio for ratio in HONEST.ratios}


def ratio_with(**changes):
    return (msgspec.structs.replace(RATIOS["eager"], **changes), RATIOS["compile"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ratios": ratio_with(median=9.0)}, "ratio to eager: 9 claimed, 1.99"),
        ({"ratios": ratio_with(median=RATIOS["eager"].median * 1.001)}, "ratio to eager"),
        ({"ratios": ratio_with(low=1.5)}, "ratio to eager, lower end: 1.5 claimed, between 1.9"),
        ({"ratios": ratio_with(high=9.0)}, "ratio to eager, upper end: 9 claimed"),
        ({"ratios": ratio_with(verdict="neutral")}, "neutral claimed against eager, win from its interval"),
        ({"ratios": (RATIOS["eager"],)}, "samples of other arms than it compares"),
        ({"ratios": (*HONEST.ratios, Ratio(baseline="peer", median=2, low=2, high=2, verdict="win"))}, "of peer"),
        ({"arms": ()}, "no samples of voxfuse, eager"),
        ({"arms": (*HONEST.arms, HONEST.arms[0])}, "listed twice"),
        ({"arms": arms_with(HONEST, "eager", gpu_us=samples(20, 0, 29))}, "different numbers of samples"),
        ({"arms": arms_with(HONEST, "eager", gpu_us=(0.0, *samples(20, 0, 29)))}, "not a positive time"),
        ({"arms": arms_with(HONEST, "eager", gpu_us=samples(30, 0))}, "ratio to eager"),
        ({"arms": arms_with(HONEST, "voxfuse", gpu_us=samples(5, 1))}, "ratio to eager"),
        ({"aa_half_width": 0.0}, "A/A half-width: 0 claimed"),
        ({"aa_half_width": 0.2}, "A/A half-width: 0.2 claimed"),
        ({"win_bar": 0.01}, "win bar 0.01 claimed, 0.03"),
        ({"controls": HONEST.controls | {"sound": 0.0}}, "claimed unsound, but they are sound"),
        ({"arms": arms_with(HONEST, "null", gpu_us=samples(30, 0))}, "control null, lower end: 0.99"),
        ({"controls": HONEST.controls | {"sleep_high": 0.99}}, "control sleep, upper end: 0.99 claimed"),
        ({"controls": {}}, "null_low is missing"),
        ({"ceilings": {}}, "copy_bytes_per_s is missing"),
        ({"ceilings": {"copy_bytes_per_s": 0.0, "launch_floor_us": 1.0}}, "a ceiling is zero"),
        ({"speed_of_light": 0.9}, "0.9 of the speed of light claimed, 0.09999"),
        ({"wrong": "error 2e-3"}, "wrong and yet claims a speed"),
    ],
)
def test_a_claim_that_the_samples_do_not_carry_is_named(changes, reason):
    assert reason in str(inconsistency(verdict(**changes)))


def test_unsound_controls_must_silence_every_comparison():
    deaf = arms_with(HONEST, "sleep", gpu_us=next(arm.gpu_us for arm in HONEST.arms if arm.name == "voxfuse"))
    record = recompute(verdict(arms=deaf))
    assert record.controls["sound"] == 0.0 and inconsistency(record) is None
    boasting = msgspec.structs.replace(record, ratios=HONEST.ratios)
    assert "win claimed against eager, neutral" in str(inconsistency(boasting))


def test_more_pairs_than_can_be_resampled_are_refused():
    arms = tuple(msgspec.structs.replace(arm, gpu_us=(1.0,) * 5_001) for arm in HONEST.arms)
    assert inconsistency(verdict(arms=arms)) == "5001 pairs; at most 5000 are read"


def test_a_wrong_verdict_is_silent():
    record = recompute(verdict(wrong="error 2e-3"))
    assert record.ratios == () and not any(arm.gpu_us for arm in record.arms)
    assert not {arm.name for arm in record.arms} & set(CONTROLS) and inconsistency(record) is None


def test_the_speed_of_light_is_the_slowest_of_bytes_arithmetic_and_one_launch():
    ceilings = {"copy_bytes_per_s": 4e12, "launch_floor_us": 2.0, "flop_per_s": 400e12}
    assert light_us(verdict(ceilings=ceilings, bytes_moved=4_000_000)) == 2.0  # one launch
    assert light_us(verdict(ceilings=ceilings, bytes_moved=40_000_000)) == pytest.approx(10)
    assert light_us(verdict(ceilings=ceilings, bytes_moved=40_000_000, flop=8 * 10**9)) == pytest.approx(20)


def test_the_interval_keeps_its_ratio_when_the_arms_are_swapped():
    a, b = np.asarray(samples(10, 1)), np.asarray(samples(11, 2))
    median, low, high = ratio_interval(a, b)
    swapped, swapped_low, swapped_high = ratio_interval(b, a)
    assert (1 / swapped, 1 / swapped_high, 1 / swapped_low) == pytest.approx((median, low, high), rel=1e-3)
