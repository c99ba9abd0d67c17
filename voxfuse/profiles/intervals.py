"""Arithmetic of time intervals, on numpy arrays of begins and ends in µs."""

from __future__ import annotations

import numpy as np


class Intervals:
    """A set of disjoint intervals in ascending order: the union of those given, cut to a window."""

    def __init__(self, begin: np.ndarray, end: np.ndarray, window: tuple[float, float]) -> None:
        begin, end = np.clip(begin, *window), np.clip(end, *window)
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
        keep = end > begin
        begin, end = begin[keep], end[keep]
        if not len(begin):
            self.begin = self.end = np.empty(0)
            return
        reach = np.maximum.accumulate(end)
        starts = np.concatenate([[True], begin[1:] > reach[:-1]])
        self.begin = begin[starts]
        self.end = reach[np.concatenate([np.nonzero(starts)[0][1:] - 1, [len(reach) - 1]])]

    @property
    def total(self) -> float:
        return float((self.end - self.begin).sum())

    def gaps(self, window: tuple[float, float]) -> Intervals:
        """What of the window they leave out."""
        begin = np.concatenate([[window[0]], self.end])
        end = np.concatenate([self.begin, [window[1]]])
        return Intervals(begin, end, window)

    def within(self, other: Intervals) -> Intervals:
        """The intersection with another set."""
        if not len(self.begin) or not len(other.begin):
            return Intervals(np.empty(0), np.empty(0), (0.0, 0.0))
        edges = np.unique(np.concatenate([self.begin, self.end, other.begin, other.end]))
        middle = (edges[1:] + edges[:-1]) / 2
        keep = self.covers(middle) & other.covers(middle)
        return Intervals(edges[:-1][keep], edges[1:][keep], (edges[0], edges[-1]))

    def covers(self, times: np.ndarray) -> np.ndarray:
        """Whether each time lies in one of the intervals."""
        if not len(self.begin):
            return np.zeros(len(times), dtype=bool)
        found = np.searchsorted(self.begin, times, side="right") - 1
        return (found >= 0) & (times < self.end[np.maximum(found, 0)])

    def measure(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """How much of each given interval they cover."""
        if not len(self.begin):
            return np.zeros(len(begin))
        lengths = np.concatenate([[0.0], np.cumsum(self.end - self.begin)])
        knots = np.stack([self.begin, self.end], axis=1).ravel()
        values = np.stack([lengths[:-1], lengths[1:]], axis=1).ravel()
        return np.interp(end, knots, values) - np.interp(begin, knots, values)


def newly_covered(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For intervals in order of their begins: what of each no earlier one covers; adds up to their union."""
    if not len(begin):
        return np.zeros(0)
    reach = np.maximum.accumulate(end)
    before = np.concatenate([[-np.inf], reach[:-1]])
    return np.maximum(end - np.maximum(begin, before), 0.0)


def totals(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """The sum of the values of each index below ``count``, as floats (``np.bincount`` of nothing gives integers)."""
    return np.bincount(index, values, minlength=count).astype(np.float64)
