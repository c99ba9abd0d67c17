"""The non-inferiority test against closed forms, brute force and simulation."""

import numpy as np
import pytest

from voxfuse.e2e.statistics import (
    Cluster,
    bootstrap_limits,
    margin_of,
    median_ratio,
    non_inferiority,
    share_lower,
    share_upper,
)

scipy_stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize(("successes", "trials"), [(0, 200), (1, 200), (3, 32), (9, 240), (32, 32), (200, 5000)])
def test_clopper_pearson_against_scipy(successes, trials):
    upper = scipy_stats.binomtest(successes, trials, alternative="less").proportion_ci(0.95, "exact").high
    lower = scipy_stats.binomtest(successes, trials, alternative="greater").proportion_ci(0.95, "exact").low
    assert share_upper(successes, trials, 0.05) == pytest.approx(upper, abs=1e-9)
    assert share_lower(successes, trials, 0.05) == pytest.approx(lower, abs=1e-9)


def test_margin_is_the_larger_of_absolute_and_relative():
    assert margin_of(0.01, 0.003, 0.15) == 0.003
    assert margin_of(0.04, 0.003, 0.15) == pytest.approx(0.006)


def clusters_of(changes, words=10):
    return [Cluster(words, 1, 1 + change) for change in changes]


def test_none_of_200_differing_passes_by_the_exact_bound():
    result = non_inferiority(clusters_of([0] * 200), margin=0.003, edits_per_change=2.0)
    assert result.method == "exact" and result.differing == 0 and result.delta == 0
    assert result.high == pytest.approx((1 - 0.05 ** (1 / 200)) * 2 / 10)  # closed form for no success
    assert result.outcome == "pass"


def test_none_of_20_differing_is_too_few():
    result = non_inferiority(clusters_of([0] * 20), margin=0.003, edits_per_change=2.0)
    assert result.outcome == "inconclusive" and result.high == pytest.approx((1 - 0.05 ** (1 / 20)) * 2 / 10)


def test_repetitions_of_the_same_utterances_do_not_shrink_the_exact_bound():
    """200 utterances that never differ say as much about unheard utterances however often each was spoken."""
    once = non_inferiority(clusters_of([0] * 200), margin=0.003, edits_per_change=2.0)
    thrice = [Cluster(3 * cluster.words, 3, 3) for cluster in clusters_of([0] * 200)]
    extended = non_inferiority(thrice, margin=0.003, edits_per_change=2.0, repetitions=3)
    assert extended.high == pytest.approx(once.high) and extended.high == pytest.approx((1 - 0.05 ** (1 / 200)) * 0.2)


def test_exact_bound_uses_the_largest_change_seen():
    small = non_inferiority(clusters_of([1] + [0] * 199), margin=0.003)
    large = non_inferiority(clusters_of([6] + [0] * 199), margin=0.003)
    assert large.high == pytest.approx(small.high * 6 / 1.5)


def test_clusters_that_got_better_do_not_pay_for_those_that_got_worse():
    worse = non_inferiority(clusters_of([1, 1] + [0] * 198), margin=0.003)
    mixed = non_inferiority(clusters_of([1, 1, -1, -1, -1] + [0] * 195), margin=0.003)
    assert mixed.delta < worse.delta
    assert mixed.high == worse.high


def test_exact_lower_limit_against_its_formula():
    result = non_inferiority(clusters_of([3] * 6 + [-2] + [0] * 23), margin=0.003, edits_per_change=1.5)
    worse = scipy_stats.binomtest(6, 30, alternative="greater").proportion_ci(0.975, "exact").low
    better = scipy_stats.binomtest(1, 30, alternative="less").proportion_ci(0.975, "exact").high
    assert result.method == "exact"
    assert result.low == pytest.approx((worse * 1 - better * 2) / 10)


def test_all_of_nine_worse_fails_by_the_exact_bound():
    result = non_inferiority(clusters_of([2] * 9), margin=0.003, edits_per_change=1.5)
    assert result.method == "exact" and result.outcome == "fail"


def test_bootstrap_takes_over_where_enough_differ():
    result = non_inferiority(clusters_of([1] * 5 + [-1] * 5 + [0] * 190), margin=0.003)
    assert result.method == "bootstrap" and result.differing == 10


def test_bootstrap_limits_against_the_binomial():
    """With changes of 0 or 1 and equal lengths, resampled Δ is a binomial share over words per cluster."""
    changes = [1] * 30 + [0] * 270
    low, high = bootstrap_limits(clusters_of(changes), 0.95, 20_000, seed=1)
    expected = scipy_stats.binom(300, 0.1).ppf([0.05, 0.95]) / 300 / 10
    assert [low, high] == pytest.approx(expected, abs=2e-4)


def test_bootstrap_resamples_words_with_their_clusters():
    """A ratio estimate: one long cluster carries all edits, so Δ is 0 or spreads with its weight."""
    clusters = [Cluster(100, 0, 10)] + [Cluster(1, 0, 0)] * 9
    rng = np.random.default_rng(5)
    draws = rng.integers(10, size=(20_000, 10))
    weight = (draws == 0).sum(1)
    brute = 10 * weight / (100 * weight + (10 - weight))
    low, high = bootstrap_limits(clusters, 0.95, 20_000, seed=2)
    assert [low, high] == pytest.approx(np.quantile(brute, [0.05, 0.95]), abs=2e-3)


def test_same_seed_same_limits():
    clusters = clusters_of(np.random.default_rng(0).integers(-1, 2, size=100))
    assert bootstrap_limits(clusters, 0.95, 1000, 7) == bootstrap_limits(clusters, 0.95, 1000, 7)
    assert bootstrap_limits(clusters, 0.95, 1000, 7) != bootstrap_limits(clusters, 0.95, 1000, 8)


@pytest.mark.parametrize(("share", "change", "truth"), [(0.005, 1, 0.0005), (0.02, 1, 0.002), (0.2, 1, 0.02)])
def test_upper_limit_covers_the_truth(share, change, truth):
    """Over 300 simulated runs of 200 sentences the upper limit misses the true Δ in about 5 % at most."""
    rng = np.random.default_rng(11)
    missed = 0
    for _ in range(300):
        changes = change * (rng.random(200) < share)
        result = non_inferiority(clusters_of(changes), margin=0.003, resamples=500)
        missed += result.high < truth
    assert missed <= 300 * 0.09  # 5 % and the bootstrap's own error at this size


def test_real_harm_of_twice_the_margin_hardly_ever_passes():
    rng = np.random.default_rng(12)
    passed = 0
    for _ in range(200):
        changes = 1 * (rng.random(240) < 0.06)  # Δ = 0.6 pp at 10 words
        passed += non_inferiority(clusters_of(changes), margin=0.003, resamples=500).outcome == "pass"
    assert passed <= 4


def test_fail_needs_the_lower_limit_above_the_margin():
    clear = non_inferiority(clusters_of([1] * 60 + [0] * 140), margin=0.003)
    close = non_inferiority(clusters_of([1] * 12 + [-1] * 4 + [0] * 184), margin=0.003)
    assert clear.outcome == "fail" and clear.low > 0.003
    assert close.delta > 0.003 and close.outcome == "inconclusive"


def test_no_words_is_an_error():
    with pytest.raises(ValueError, match="needs reference words"):
        non_inferiority([Cluster(0, 0, 1)], margin=0.003)


def test_median_ratio():
    result = median_ratio([2.0] * 12, [1.0] * 12)
    assert result == (2.0, 2.0, 2.0) and result.half_width == 1.0
    rng = np.random.default_rng(3)
    noisy = median_ratio((1.2 * np.exp(0.05 * rng.standard_normal(40))).tolist(), [1.0] * 40)
    assert noisy.low < 1.2 < noisy.high and noisy.low > 1.1 and noisy.high < 1.3
    with pytest.raises(ValueError, match="as many pairs"):
        median_ratio([1.0], [])
