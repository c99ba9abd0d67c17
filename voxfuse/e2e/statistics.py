"""Is the patched arm's word error rate non-inferior? A paired cluster bootstrap, and an exact bound for few changes.

A cluster is an utterance with all its repetitions (Bisani & Ney 2004; Liu & Peng 2020, arXiv 1912.09508). The
statistic is the corpus difference Δ = Σ (patched edits − baseline edits) / Σ words. H0: Δ ≥ margin.

Where fewer than ``exact_below`` clusters differ, the bootstrap cannot see what it did not sample: with none it says
Δ = 0 ± 0 from any sample size. An exact companion replaces it. Of n clusters, k got worse and h got better:

    upper(Δ) = CP_upper(k, n; α) · m / w,      lower(Δ) = [CP_lower(k, n; α/2) · 1 − CP_upper(h, n; α/2) · m′] / w

with CP the Clopper–Pearson limits of a share (exact, any n), w the mean words of a cluster in this text set, and m (m′)
the edits by which a cluster that got worse (better) changes at most *on average*: the larger of ``edits_per_change``
and of the largest such change seen. A cluster of R repetitions has R times the words of one, and may change in each of
them: its m is at least R · ``edits_per_change``, or an extension would shrink the bound without hearing anything new.
The upper limit grants no credit for clusters that got better; the lower limit counts one edit for each that got worse,
so few changes seldom prove harm.

The one assumption is m. Without it nothing can be shown from 200 sentences (a change of every word in the 1.5 % of
clusters that may lurk unseen would be 1.5 pp). It holds because both arms have passed the fidelity tier: the samples
are equal or nearly so, so the transcriber changes its mind about single words at a decision boundary.
``edits_per_change`` is declared in the protocol.

A verdict after the one extension that a protocol may declare is taken at the same level; two looks at 5 % reject a true
H0 with at most 10 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

Outcome = Literal["pass", "fail", "inconclusive"]


class Cluster(NamedTuple):
    """One utterance, summed over its repetitions."""

    words: int
    baseline: int
    patched: int


class NonInferiority(NamedTuple):
    """Fractions, not percent. ``low`` and ``high`` are one-sided limits at the declared confidence, each by itself."""

    delta: float
    low: float
    high: float
    margin: float
    clusters: int
    differing: int
    method: Literal["bootstrap", "exact"]
    outcome: Outcome


def margin_of(baseline_wer: float, absolute: float, relative: float) -> float:
    """The margin as a fraction: the larger of the absolute one and the share ``relative`` of the baseline's WER."""
    return max(absolute, relative * baseline_wer)


def non_inferiority(
    clusters: Sequence[Cluster],
    *,
    margin: float,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    exact_below: int = 10,
    edits_per_change: float = 1.5,
    repetitions: int = 1,
) -> NonInferiority:
    """Judge Δ corpus WER against a margin declared before the run.

    ``edits_per_change`` is of one repetition; a cluster sums over up to ``repetitions``.

    ``pass``: the upper limit is below the margin; ``fail``: the lower limit is above it; else ``inconclusive``.
    Raises ValueError where the clusters hold no words.
    """
    words = sum(cluster.words for cluster in clusters)
    if words == 0:
        raise ValueError(f"non-inferiority needs reference words, got none in {len(clusters)} utterances")
    changes = np.array([cluster.patched - cluster.baseline for cluster in clusters])
    differing = int(np.count_nonzero(changes))
    method: Literal["bootstrap", "exact"] = "exact" if differing < exact_below else "bootstrap"
    if method == "exact":
        low, high = exact_limits(changes, words, confidence, edits_per_change * repetitions)
    else:
        low, high = bootstrap_limits(clusters, confidence, resamples, seed)
    outcome: Outcome = "pass" if high < margin else "fail" if low > margin else "inconclusive"
    return NonInferiority(float(changes.sum()) / words, low, high, margin, len(clusters), differing, method, outcome)


def bootstrap_limits(clusters: Sequence[Cluster], confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    """One-sided percentile limits of Δ over resampled clusters; the words are resampled with their clusters."""
    rng = np.random.default_rng(seed)
    changes = np.array([cluster.patched - cluster.baseline for cluster in clusters], dtype=np.float64)
    words = np.array([cluster.words for cluster in clusters], dtype=np.float64)
    weights = rng.multinomial(len(clusters), np.full(len(clusters), 1 / len(clusters)), size=resamples)
    totals = weights @ words
    deltas = (weights @ changes)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(deltas, [1 - confidence, confidence])
    return float(low), float(high)


def exact_limits(changes: np.ndarray, words: int, confidence: float, edits_per_change: float) -> tuple[float, float]:
    """The exact companion's limits of Δ by the module's formula; ``edits_per_change`` is that of a whole cluster."""
    n, alpha = len(changes), 1 - confidence
    worse, better = int(np.sum(changes > 0)), int(np.sum(changes < 0))
    mean_words = words / n
    most_worse = max(edits_per_change, float(np.max(changes, initial=0)))
    most_better = max(edits_per_change, float(np.max(-changes, initial=0)))
    high = share_upper(worse, n, alpha) * most_worse / mean_words
    low = (share_lower(worse, n, alpha / 2) - share_upper(better, n, alpha / 2) * most_better) / mean_words
    return low, high


def share_upper(successes: int, trials: int, alpha: float) -> float:
    """Clopper–Pearson one-sided upper limit of a share: the p at which P(X ≤ successes) = alpha."""
    if successes >= trials:
        return 1.0
    return _solve(lambda p: _binomial_cdf(successes, trials, p) - alpha)


def share_lower(successes: int, trials: int, alpha: float) -> float:
    """Clopper–Pearson one-sided lower limit of a share: the p at which P(X ≥ successes) = alpha."""
    if successes <= 0:
        return 0.0
    return _solve(lambda p: alpha - (1 - _binomial_cdf(successes - 1, trials, p)))


def _binomial_cdf(successes: int, trials: int, p: float) -> float:
    """P(X ≤ successes), summed in logs so that large numbers of trials neither overflow nor vanish."""
    if p <= 0.0 or p >= 1.0:
        return float(p <= 0.0)
    log_terms = (
        math.lgamma(trials + 1)
        - math.lgamma(i + 1)
        - math.lgamma(trials - i + 1)
        + i * math.log(p)
        + (trials - i) * math.log1p(-p)
        for i in range(successes + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in log_terms))


def _solve(falling: Callable[[float], float]) -> float:
    """The zero of a falling function on [0, 1] by bisection, to 1e-12."""
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if falling(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class MedianRatio(NamedTuple):
    """Median of paired ratios with its bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Largest distance of the interval from 1: the noise, when both arms are the same."""
        return max(abs(self.low - 1), abs(self.high - 1))


def median_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> MedianRatio:
    """Median of numerators / denominators, paired, with a two-sided percentile bootstrap interval over pairs.

    Raises ValueError where there is no pair, or the lengths differ.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(f"expected as many pairs on both sides, got {len(numerators)} and {len(denominators)}")
    ratios = np.asarray(numerators, dtype=np.float64) / np.asarray(denominators, dtype=np.float64)
    rng = np.random.default_rng(seed)
    medians = np.median(ratios[rng.integers(len(ratios), size=(resamples, len(ratios)))], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return MedianRatio(float(np.median(ratios)), float(low), float(high))
