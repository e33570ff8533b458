"""Describe what a rank is doing, and for how long nothing has moved on it, for the live page of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ddlcore.messages import Activity, Traffic

MOST_NAMES = 8  # names that are sent: the page shows no more
_LONGEST = 200  # characters of a name or a sentence that are sent


class ActivityMeter:
    """What one rank tells about its operations. Only one thread at a time may call its methods."""

    def __init__(self, members: Callable[[int], tuple[int, ...]], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the meter. ``members`` returns the ranks of a process set, or an empty tuple if these are all ranks."""
        self._members = members
        self._clock = clock
        self._ended = -1
        self._since_s = 0.0

    def read(
        self,
        stats: Mapping[str, Any],
        doing: str,
        pending: Collection[tuple[str, int]],
        input_s: float = 0.0,
        sampled_s: float = 0.0,
        traffic: tuple[Traffic, ...] = (),
    ) -> Activity:
        """Return the present activity.

        ``stats`` are the rank's statistics, ``doing`` describes what it is doing, and ``pending`` are the names and
        process sets of its operations in flight. The wait is counted from the first call that saw the present number of ended buckets, so
        it is too short by at most the time between two calls.
        """
        now_s = self._clock()
        ended = stats["buckets_negotiated"] + stats["buckets_replayed"]
        if ended != self._ended or not pending:
            self._ended, self._since_s = ended, now_s
        return Activity(
            doing=doing[:_LONGEST],
            waits_s=now_s - self._since_s,
            in_flight=tuple((name[:_LONGEST], self._members(at)) for name, at in sorted(pending)[:MOST_NAMES]),
            pending=len(pending),
            input_s=input_s,
            sampled_s=sampled_s,
            transport_s=stats["seconds"]["transport"],
            nbytes=sum(stats["bytes"].values()),
            route=stats["routes"].get(0, "").partition(" (")[0],
            traffic=traffic,
        )
