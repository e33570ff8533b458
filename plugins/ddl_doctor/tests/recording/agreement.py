"""What the buckets of a trace say themselves of its clocks: no rank has a sum before the last one has come.

A bucket is a message between each two of its ranks, there and back, and so bounds by how much their clocks may differ,
as an exchange of NTP's does. To say that a bucket's ends lie no further apart than what is said of the clocks plus what the
algorithm takes from the last rank's entry on is the same: either fails where a rank ends before another has begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddl_doctor.timeline.summary import BucketRun

__all__ = ["Apart", "ahead_us", "ends_apart"]


@dataclass(frozen=True)
class Apart:
    """How far the ends of one sum lie apart, in us, and what that may be."""

    us: float
    error_us: float  # of the two clocks that are worst known
    took_us: float  # from the last entry to the last end
    replayed: bool


def _buckets(runs: Iterable[BucketRun]) -> list[dict[int, BucketRun]]:
    found: dict[str, dict[int, BucketRun]] = defaultdict(dict)
    for run in runs:
        if run.kind == "ALLREDUCE":
            found[run.key][run.pid] = run
    return [members for members in found.values() if len(members) > 1]


def ends_apart(runs: Iterable[BucketRun], metadata: dict[str, Any]) -> list[Apart]:
    """Of each sum. By clocks that are right, its ends lie no further apart than ``error_us + took_us``."""
    error_us = {one["pid"]: one["clock_error_us"] for one in metadata["ranks"]}
    found = []
    for members in _buckets(runs):
        ends = [run.ended for run in members.values()]
        took_us = max(ends) - max(run.begun for run in members.values()) + 0.002  # two roundings to a nanosecond
        worst_us = sum(sorted(error_us[pid] for pid in members)[-2:])
        replayed = all(run.step is not None for run in members.values())
        found.append(Apart(max(ends) - min(ends), worst_us, took_us, replayed))
    return found


def ahead_us(runs: Iterable[BucketRun], pid: int) -> tuple[float, float]:
    """By how much ``pid``'s clock may be ahead of rank 0's, if all sums of both are to make sense."""
    both = [(members[0], members[pid]) for members in _buckets(runs) if 0 in members and pid in members]
    return max(one.begun - base.ended for base, one in both), min(one.ended - base.begun for base, one in both)
