"""What follows from matrices between GPUs: islands that reach each other directly, and what leaving one costs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["islands", "median_between", "median_within", "useless_pairs"]

Numbers = Sequence[Sequence[float | None]]
_USELESS = 0.8  # of the latency without it: peer access that brings less than a fifth brings nothing


def islands(peers: Sequence[Sequence[bool]]) -> list[tuple[int, ...]]:
    """Groups whose members reach each other both ways, directly or through others of the group; in order.

    A matrix all Y is one island, one all N as many as there are GPUs.
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
    """Of pairs within a group; None where nothing was measured."""
    return _median([values[a][b] for group in groups for a in group for b in group if a != b])


def median_between(values: Numbers, groups: Sequence[Sequence[int]]) -> float | None:
    """Of pairs of different groups."""
    pairs = [(a, b) for one in groups for other in groups if one is not other for a in one for b in other]
    return _median([values[a][b] for a, b in pairs])


def useless_pairs(peers: Sequence[Sequence[bool]], latency_on: Numbers, latency_off: Numbers) -> list[tuple[int, int]]:
    """Pairs that are said to reach each other, but are hardly faster for it."""
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
