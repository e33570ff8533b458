"""Decide on which hosts of an elastic job processes run: which agents and ranks to start, which ranks to dismiss.

A *place* is a rank number of the launch. Several processes may run at the same place one after another, also on
different hosts. This module does no I/O and reads no clock: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddlcore.contracts.launcher import HostSlots
from ddlcore.messages.ranks import LaunchedRank

_FREE, _BUSY, _LEAVING, _DONE = "free", "busy", "leaving", "done"


@dataclass(frozen=True)
class CallHost:
    """The decision to start an agent on ``host`` (an index in the host table), so that the host can be used."""

    host: int


@dataclass(frozen=True)
class Start:
    """The decision to start a process at ``place`` on ``host`` (an index in the host table)."""

    place: LaunchedRank
    host: int


@dataclass(frozen=True)
class Dismiss:
    """The decision that the processes at ``places`` must leave the training. ``reason`` says why."""

    places: tuple[LaunchedRank, ...]
    reason: str


Decision = CallHost | Start | Dismiss


@dataclass
class _Host:
    name: str
    slots: int  # number of processes that the host may run now
    reached: bool  # whether processes can be started on the host now
    calling: bool = False  # whether the agent of the host is being started
    called_s: float = 0.0  # since when, if it is
    failures: int = 0  # number of failures one after another
    blocked_until_s: float = 0.0  # no process is started on the host before this time
    leaving: bool = False  # whether the agent of the host has asked to leave the job
    last_failure_s: float = field(default=-float("inf"))


def cooldown_range(text: str) -> tuple[float, float]:
    """Return the two times in seconds that ``text`` contains, such as "60 600".

    Raises ValueError, with a message of one line, if ``text`` is not two positive numbers in ascending order.
    """
    try:
        least_s, most_s = map(float, text.replace(",", " ").split())
    except ValueError:
        raise ValueError(f"host_cooldown_s is '{text}': give two numbers of seconds, such as '60 600'") from None
    if not 0 < least_s <= most_s < float("inf"):
        raise ValueError(f"host_cooldown_s is '{text}': the first time must be above 0, the second no less")
    return least_s, most_s


class HostTable:
    """The hosts and places of one elastic job. The thread of the supervisor calls all methods."""

    def __init__(
        self,
        hosts: Sequence[HostSlots],
        assigned: Sequence[int],
        places: int,
        most: int,
        cooldown_s: tuple[float, float],
        here: int = -1,
    ) -> None:
        """Begin with ``hosts``, and with a running process at each of the first places.

        ``assigned`` has the host index of each of these processes. Processes can be started at once on these hosts and
        on the launching process's own host, which has the index ``here``; -1 means that the launching process starts no
        processes itself. There are ``places`` places. At most ``most`` processes run at the same time, not counting
        processes that are leaving. After a failure, no process is started on the host for some time. After the host's
        first failure, this time is the first value of ``cooldown_s`` (seconds). Each further failure doubles it, up to
        the second value.
        """
        self.here = here
        reached = {*assigned, here}
        self.hosts = [_Host(one.host, one.slots, index in reached) for index, one in enumerate(hosts)]
        self._at: list[int] = [*assigned, *[-1] * (places - len(assigned))]  # by place: host of the last process
        self._state = [_BUSY] * len(assigned) + [_FREE] * (places - len(assigned))
        self._most = most
        self._cooldown_s = cooldown_s

    # --- what happens

    def found(self, entries: Sequence[HostSlots]) -> None:
        """Record ``entries``, all hosts that host discovery has found now, with their slots.

        A known host that is not in ``entries`` will leave the job. A new host may be used from now on.
        """
        known = {host.name: host for host in self.hosts}
        slots = {one.host: one.slots for one in entries}
        for name, host in known.items():
            host.slots = 0 if host.leaving else slots.get(name, 0)
            host.leaving = host.leaving and name in slots  # a host that was missing once may be used again later
        self.hosts += [_Host(name, count, False) for name, count in slots.items() if name not in known]

    def leaves(self, host: int) -> None:
        """Record that ``host`` leaves the job, even if host discovery still finds it.

        The host may be used again after host discovery has found hosts once and this host was not among them.
        """
        self.hosts[host].slots, self.hosts[host].leaving = 0, True

    def reached(self, host: int) -> None:
        """Record that processes can be started on ``host`` from now on."""
        self.hosts[host].reached, self.hosts[host].calling = True, False

    def lost(self, host: int, now_s: float) -> None:
        """Record at the time ``now_s`` that ``host`` cannot be reached. No process is started there for some time."""
        self.hosts[host].reached = self.hosts[host].calling = False
        self._block(host, now_s)

    def ended(self, place: LaunchedRank, succeeded: bool) -> None:
        """Record that the process at ``place`` has ended, and that the supervisor does not start it again.

        ``succeeded`` is false if the process has failed.
        """
        done = succeeded and self._state[place] == _BUSY  # its script is complete, so a new process would end, too
        self._state[place] = _DONE if done else _FREE

    def failed(self, place: LaunchedRank, now_s: float) -> None:
        """Record at the time ``now_s`` that the processes at ``place`` have failed too often.

        No process is started on the host of ``place`` for some time.
        """
        self._state[place] = _FREE
        self._block(self._at[place], now_s)

    # --- what follows

    def host_of(self, place: LaunchedRank) -> int:
        """Return the index of the host on which the latest process for ``place`` was started.

        Return -1 if none was started.
        """
        return self._at[place]

    def name_of(self, place: LaunchedRank) -> str:
        """Return the name of the host on which the latest process for ``place`` was started.

        Return "" if none was started.
        """
        return self.hosts[self._at[place]].name if self._at[place] >= 0 else ""

    def is_leaving(self, place: LaunchedRank) -> bool:
        """Return whether the process at ``place`` was dismissed."""
        return self._state[place] == _LEAVING

    def called_before(self, time_s: float) -> list[int]:
        """Return the indexes of hosts whose agents were called before ``time_s`` and have not reported."""
        return [index for index, host in enumerate(self.hosts) if host.calling and host.called_s < time_s]

    @property
    def places(self) -> int:
        """The number of places, used and unused."""
        return len(self._at)

    def decide(self, now_s: float) -> list[Decision]:
        """Return the decisions that the caller must carry out now. The table assumes that the caller does so.

        ``now_s`` is the present time in seconds.
        """
        decisions: list[Decision] = [*self._dismissals()]
        for index, host in enumerate(self.hosts):
            if host.calling or now_s < host.blocked_until_s:
                continue
            for _ in range(host.slots - self._count(index, _BUSY, _LEAVING)):
                place = self._free_place(index)
                if place < 0 or self._state.count(_BUSY) + self._called() >= self._most:
                    break
                if not host.reached:
                    host.calling, host.called_s = True, now_s
                    decisions.append(CallHost(index))
                    break
                self._at[place], self._state[place] = index, _BUSY
                decisions.append(Start(place, index))
        return decisions

    def _dismissals(self) -> list[Dismiss]:
        found = []
        for index, host in enumerate(self.hosts):
            busy = [
                LaunchedRank(place) for place, at in enumerate(self._at) if at == index and self._state[place] == _BUSY
            ]
            surplus = tuple(busy[host.slots :])
            for place in surplus:
                self._state[place] = _LEAVING
            if surplus:
                less = f"takes no more than {host.slots} now" if host.slots else "leaves the job"
                found.append(Dismiss(surplus, f"{host.name} {less}"))
        return found

    def _called(self) -> int:
        """Return the number of processes that could run on the hosts whose agents are being started now.

        This number is used so that no more agents are started than needed.
        """
        return sum(host.slots for host in self.hosts if host.calling)

    def _count(self, host: int, *states: str) -> int:
        return sum(at == host and state in states for at, state in zip(self._at, self._state, strict=True))

    def _free_place(self, host: int) -> LaunchedRank:
        """Return a free place for a process on ``host``, or -1 if no place is free.

        If possible, return a place whose latest process was on ``host``, too.
        """
        free = [LaunchedRank(place) for place, state in enumerate(self._state) if state == _FREE]
        return min(free, key=lambda place: (self._at[place] != host, place), default=LaunchedRank(-1))

    def _block(self, index: int, now_s: float) -> None:
        host = self.hosts[index]
        least, most = self._cooldown_s
        if now_s - host.last_failure_s > 2 * most:
            host.failures = 0
        if now_s >= host.blocked_until_s:  # else it is another rank of the same failure
            host.failures += 1
        host.last_failure_s = now_s
        host.blocked_until_s = now_s + min(most, least * 2 ** (host.failures - 1))
