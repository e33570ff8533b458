"""Computes islands of GPUs that access each other directly, and what leaving an island costs, from matrices. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Numbers = Sequence[Sequence[float | None]]
_USELESS = 0.8  # fraction of the latency without peer access; above it, the gain is too small to count


def islands(peers: Sequence[Sequence[bool]]) -> list[tuple[int, ...]]:
    """Return groups whose members reach each other in both directions, directly or through other members; in order.

    A matrix with all Y is one island; a matrix with all N has as many islands as GPUs.
    """
    left = set(range(len(peers)))
    found = []
    while left:
        group, todo = set(), [min(left)]
        while todo:
            one = todo.pop()
            if one in left:
                left.discard(one)
                group.add(one)
                todo += [other for other in left if peers[one][other] and peers[other][one]]
        found.append(tuple(sorted(group)))
    return found


def median_within(values: Numbers, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the median over pairs within a group; None if nothing was measured."""
    return _median([values[a][b] for group in groups for a in group for b in group if a != b])


def median_between(values: Numbers, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the median over pairs of different groups; None if nothing was measured."""
    pairs = [(a, b) for one in groups for other in groups if one is not other for a in one for b in other]
    return _median([values[a][b] for a, b in pairs])


def useless_pairs(peers: Sequence[Sequence[bool]], latency_on: Numbers, latency_off: Numbers) -> list[tuple[int, int]]:
    """Return the pairs that have peer access but are hardly faster with it."""
    found = []
    for a, row in enumerate(peers):
        for b, reaches in enumerate(row):
            on, off = latency_on[a][b], latency_off[a][b]
            if reaches and on is not None and off is not None and on > _USELESS * off:
                found.append((a, b))
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
