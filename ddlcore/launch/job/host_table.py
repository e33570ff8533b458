"""Decides on which hosts of an elastic job processes run: which hosts are called, and which ranks start or leave where.

It does no I/O and knows no time of its own. A *place* is a number of the launch, at which one process after another may
run, also on different hosts; the launcher calls it a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddlcore.contracts.launcher import HostSlots

_FREE, _BUSY, _LEAVING, _DONE = "free", "busy", "leaving", "done"


@dataclass(frozen=True)
class Call:
    """The decision to start the agent of a host."""

    host: int


@dataclass(frozen=True)
class Start:
    """The decision to start a process at ``place`` on ``host``, which can be reached."""

    place: int
    host: int


@dataclass(frozen=True)
class Dismiss:
    """The decision that the processes at ``places`` leave the training, and why."""

    places: tuple[int, ...]
    reason: str


Decision = Call | Start | Dismiss


@dataclass
class _Host:
    name: str
    slots: int  # how many processes it may run now
    reached: bool  # whether processes can be started there now
    calling: bool = False  # whether its agent is being started
    failures: int = 0  # in a row
    blocked_until_s: float = 0.0
    leaving: bool = False  # it has said so itself
    last_failure_s: float = field(default=-float("inf"))


def cooldown_range(text: str) -> tuple[float, float]:
    """Return the two times of ``text``, in seconds. Raises ValueError, with a message of one line, for anything else."""
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
        """Begin with ``hosts``, and with processes at the first places, whose hosts are ``assigned``.

        These hosts count as reached, and so does the launching process's own host, which has the index ``here``; -1
        means that the launching process starts no processes itself. There are ``places`` places, and processes run at
        ``most`` of them at the same time, not counting those that leave. ``cooldown_s`` says for how many seconds a
        host is left out after its first failure; the time doubles with each failure, up to the second value.
        """
        reached = {*assigned, here}
        self.hosts = [_Host(one.host, one.slots, index in reached) for index, one in enumerate(hosts)]
        self._at: list[int] = [*assigned, *[-1] * (places - len(assigned))]  # the host of the last process
        self._state = [_BUSY] * len(assigned) + [_FREE] * (places - len(assigned))
        self._most = most
        self._cooldown_s = cooldown_s

    # --- what happens

    def found(self, entries: Sequence[HostSlots]) -> None:
        """Take the hosts that host discovery has found now.

        A host that is missing leaves the job, and a new one may be used.
        """
        known = {host.name: host for host in self.hosts}
        slots = {one.host: one.slots for one in entries}
        for name, host in known.items():
            host.slots = 0 if host.leaving else slots.get(name, 0)
            host.leaving = host.leaving and name in slots  # once it was away, it may come back
        self.hosts += [_Host(name, count, False) for name, count in slots.items() if name not in known]

    def leaves(self, host: int) -> None:
        """Take the news that ``host`` leaves the job, whatever is found."""
        self.hosts[host].slots, self.hosts[host].leaving = 0, True

    def reached(self, host: int) -> None:
        """Record that processes can be started on ``host`` from now on."""
        self.hosts[host].reached, self.hosts[host].calling = True, False

    def lost(self, host: int, now_s: float) -> None:
        """Record that ``host`` cannot be reached, or can no longer be reached. It is left out for a while."""
        self.hosts[host].reached = self.hosts[host].calling = False
        self._block(host, now_s)

    def ended(self, place: int, succeeded: bool) -> None:
        """Record that the process at ``place`` has ended, and that the supervisor will not start another one there."""
        done = succeeded and self._state[place] == _BUSY  # its script has ended, so another one would do so, too
        self._state[place] = _DONE if done else _FREE

    def failed(self, place: int, now_s: float) -> None:
        """Record that processes have failed too often at ``place``. Its host is left out for a while."""
        self._state[place] = _FREE
        self._block(self._at[place], now_s)

    # --- what follows

    def host_of(self, place: int) -> int:
        """Return the index of the host on which the last process at ``place`` was started, or -1 if none was."""
        return self._at[place]

    def name_of(self, place: int) -> str:
        """Return the name of the host of the last process at ``place``. It is empty if none was started."""
        return self.hosts[self._at[place]].name if self._at[place] >= 0 else ""

    @property
    def places(self) -> int:
        """The number of places."""
        return len(self._at)

    def decide(self, now_s: float) -> list[Decision]:
        """Return what is to be done now. The table counts each decision as carried out."""
        decisions: list[Decision] = [*self._dismissals()]
        for index, host in enumerate(self.hosts):
            if host.calling or now_s < host.blocked_until_s:
                continue
            for _ in range(host.slots - self._count(index, _BUSY, _LEAVING)):
                place = self._free_place(index)
                if place < 0 or self._state.count(_BUSY) + self._called() >= self._most:
                    break
                if not host.reached:
                    host.calling = True
                    decisions.append(Call(index))
                    break
                self._at[place], self._state[place] = index, _BUSY
                decisions.append(Start(place, index))
        return decisions

    def _dismissals(self) -> list[Dismiss]:
        found = []
        for index, host in enumerate(self.hosts):
            busy = [place for place, at in enumerate(self._at) if at == index and self._state[place] == _BUSY]
            surplus = tuple(busy[host.slots :])
            for place in surplus:
                self._state[place] = _LEAVING
            if surplus:
                less = f"takes no more than {host.slots} now" if host.slots else "leaves the job"
                found.append(Dismiss(surplus, f"{host.name} {less}"))
        return found

    def _called(self) -> int:
        """Return how many processes could run on the hosts that are being called now.

        With this number, no more hosts are called than needed.
        """
        return sum(host.slots for host in self.hosts if host.calling)

    def _count(self, host: int, *states: str) -> int:
        return sum(at == host and state in states for at, state in zip(self._at, self._state, strict=True))

    def _free_place(self, host: int) -> int:
        """Return a place for a process on ``host``, if possible one that was there before; -1 if none is free."""
        free = [place for place, state in enumerate(self._state) if state == _FREE]
        return min(free, key=lambda place: (self._at[place] != host, place), default=-1)

    def _block(self, index: int, now_s: float) -> None:
        host = self.hosts[index]
        least, most = self._cooldown_s
        if now_s - host.last_failure_s > 2 * most:
            host.failures = 0
        host.failures += 1
        host.last_failure_s = now_s
        host.blocked_until_s = now_s + min(most, least * 2 ** (host.failures - 1))
