"""Compute with intervals of time: the union and the intersection of intervals, and how much of a span they cover."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]  # begin and end, in the same unit


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals, each sorted and without overlaps."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


class Cover:
    """A set of intervals. Computes how much of a given span the intervals cover."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.intervals = _union(intervals)
        self._begins = [begin for begin, _ in self.intervals]

    def of(self, span: Interval) -> float:
        """Return how much of ``span`` the intervals cover, as a length in the unit of the intervals."""
        begin, end = span
        at = max(bisect(self._begins, begin) - 1, 0)
        found = 0.0
        while at < len(self.intervals) and self._begins[at] < end:
            found += max(min(self.intervals[at][1], end) - max(self._begins[at], begin), 0.0)
            at += 1
        return found


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
