"""Finds islands of GPUs, and computes how much slower copies between islands are than copies within an island.

An island is a group of GPUs that are connected by direct access to each other's memory; see ``islands``. The functions
of this module take matrices of facts that other modules have collected.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Numbers = Sequence[Sequence[float | None]]
_USELESS = 0.8  # peer access whose latency is more than this fraction of the latency without it counts as useless


def islands(peers: Sequence[Sequence[bool]]) -> list[tuple[int, ...]]:
    """Return the groups of GPUs that can access each other, directly or through other GPUs of the group.

    ``peers[a][b]`` says whether GPU a can access the memory of GPU b. Only access in both directions counts. The groups
    and their members are in ascending order. If all GPUs access each other, there is one group. If no GPU accesses
    another GPU, each GPU is a group of its own.
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
    """Return the median of ``values`` over all pairs of GPUs of the same group; None if no such pair was measured.

    ``values[a][b]`` was measured from GPU a to GPU b; None means not measured. ``groups`` lists the GPUs of each group.
    """
    return _median([values[a][b] for group in groups for a in group for b in group if a != b])


def median_between(values: Numbers, groups: Sequence[Sequence[int]]) -> float | None:
    """Return the median of ``values`` over all pairs of GPUs of different groups; None if no such pair was measured.

    ``values[a][b]`` was measured from GPU a to GPU b; None means not measured. ``groups`` lists the GPUs of each group.
    """
    pairs = [(a, b) for one in groups for other in groups if one is not other for a in one for b in other]
    return _median([values[a][b] for a, b in pairs])


def useless_pairs(peers: Sequence[Sequence[bool]], latency_on: Numbers, latency_off: Numbers) -> list[tuple[int, int]]:
    """Return the pairs (from, to) of GPUs that have peer access, but whose copies are hardly faster with peer access.

    ``peers[a][b]`` says whether GPU a can access the memory of GPU b. ``latency_on[a][b]`` is the latency of a copy
    from GPU a to GPU b with peer access, and ``latency_off[a][b]`` is the latency without peer access. None means that
    the copy was not measured.
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
