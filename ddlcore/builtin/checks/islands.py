"""Finds islands of GPUs that access each other's memory directly, and what leaving an island costs.

It only computes, from matrices of facts that other modules have collected.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Numbers = Sequence[Sequence[float | None]]
_USELESS = 0.8  # peer access whose latency is more than this fraction of the latency without it counts as useless


def islands(peers: Sequence[Sequence[bool]]) -> list[tuple[int, ...]]:
    """Return the groups of GPUs that can access each other, directly or through other GPUs of the group.

    ``peers[a][b]`` says whether GPU a can access the memory of GPU b. Only access in both directions counts. The groups
    and their members are in ascending order. If all GPUs access each other, there is one group; if none do, each GPU is
    a group of its own.
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
    """Return the median of ``values`` over all pairs of GPUs of the same group; None if no such pair was measured."""
    return _median([values[a][b] for group in groups for a in group for b in group if a != b])


def median_between(values: Numbers, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the median of ``values`` over all pairs of GPUs of different groups; None if no such pair was measured."""
    pairs = [(a, b) for one in groups for other in groups if one is not other for a in one for b in other]
    return _median([values[a][b] for a, b in pairs])


def useless_pairs(peers: Sequence[Sequence[bool]], latency_on: Numbers, latency_off: Numbers) -> list[tuple[int, int]]:
    """Return the pairs of GPUs that have peer access but are hardly faster with it.

    ``latency_on`` and ``latency_off`` are the latencies of copies with and without peer access, as [from][to].
    """
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
