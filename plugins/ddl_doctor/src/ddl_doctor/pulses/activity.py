"""Describe the present activity of a rank for the live page: its operations in flight, and how long they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ddl_doctor.reports import Activity, Traffic

MOST_NAMES = 8  # at most so many names are sent: the page shows no more
_LONGEST = 200  # characters of a name or a sentence that are sent


class ActivityMeter:
    """A meter that describes the operations of one rank. Only one thread at a time may call its methods."""

    def __init__(self, members: Callable[[int], tuple[int, ...]], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the meter.

        ``members`` returns the ranks of the process set with a given id, or an empty tuple for the global process set.
        ``clock`` returns a monotonic time in seconds.
        """
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
        """Return the present activity of the rank.

        ``stats`` holds the rank's statistics (``ddl.stats()``), and ``doing`` is a text about its present state.
        ``pending`` holds the name and process set id of each operation in flight. The rank was observed for
        ``sampled_s`` seconds, and spent ``input_s`` of them waiting for input. ``traffic`` holds counts of the network
        interfaces.

        ``waits_s`` of the result is the time for which no bucket has ended, or 0 if no operation is in flight. It is
        counted from the first call that found the present number of ended buckets. So it may be too short, by at most
        the time between two calls.
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
