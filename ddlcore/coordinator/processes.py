"""Records the processes at the places of an elastic job: which of them live, and on which hosts. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddlcore.messages.elastic import Process
from ddlcore.messages.ranks import LaunchedRank, StartNumber


class Processes:
    """The present process at each place of one elastic job, and why it ended if there is none."""

    def __init__(self, hosts: Sequence[int]) -> None:
        """Begin with one process at each place. ``hosts`` has the index of the host for each place; -1 means that no process runs there."""
        self.hosts = list(hosts)
        self.alive = {LaunchedRank(place) for place, host in enumerate(hosts) if host >= 0}
        self._starts = [StartNumber(0)] * len(hosts)  # by place: how many processes were there before the present one
        self._ends: dict[LaunchedRank, str] = {}  # why the process of a place ended, while there is no other one

    def at(self, place: LaunchedRank) -> Process:
        """Return the present process at ``place``, or the last one if none runs there."""
        return place, self._starts[place]

    def is_first(self, place: LaunchedRank) -> bool:
        """Return whether no process was at ``place`` before the present one."""
        return not self._starts[place]

    def started(self, place: LaunchedRank, host: int) -> None:
        """Record a new process at ``place`` on the host with the index ``host``; -1: the host of the one before."""
        if host >= 0:
            self.hosts[place] = host
        self._starts[place] = StartNumber(self._starts[place] + 1)
        self.alive.add(place)
        self._ends.pop(place, None)

    def ended(self, place: LaunchedRank, reason: str) -> None:
        """Record that the process at ``place`` has ended for ``reason``."""
        self.alive.discard(place)
        self._ends[place] = reason

    def adopt(self, hosts: Sequence[int], known: Iterable[Process], running: Mapping[Process, int]) -> None:
        """Take over the processes that are ``running``, with the indexes of their hosts. ``known`` are all others.

        ``hosts`` are the hosts of the last world.
        """
        self.hosts = list(hosts)
        for (place, _), host in running.items():  # it may have been started after the world had opened
            self.hosts[place] = host
        for place, start in (*known, *running):
            self._starts[place] = max(self._starts[place], start)
        # A process before the last one at its place was given up: what it says must not count as words of the last one.
        self.alive = {place for place, start in running if start == self._starts[place]}

    def causes(self) -> str:
        """Return how the first of the processes that are not back have ended, in words that follow a sentence."""
        ends = [f"rank {place} {reason}" for place, reason in sorted(self._ends.items())]
        return f": {'; '.join(ends[:3])}" if ends else ""
