"""Record how the world of an elastic job changes, and describe these changes in lines of text for the user.

A world is the set of ranks that train together until a rank leaves or joins. This module only records. It uses the ends
of processes, the messages by which ranks register for the next world, and the Welcome messages that begin a world.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages import FromCoordinator, Register, ToCoordinator, Welcome, World
from ddlcore.text.ranks import ranks_text

_MOST_ROWS = 10  # limit for the rows of the summary; the oldest rows are left out


@dataclass(frozen=True)
class Change:
    """The beginning of a world other than the first: its time, and the line of text for the user."""

    after_s: float  # seconds from the beginning of the first world
    text: str


class History:
    """The worlds that one elastic job has had so far, described in lines of text for the user.

    The supervisor's thread calls ``ended``, and the control server's thread calls ``heard`` and ``told``. Any thread
    may call ``summary`` and ``status``.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without a world. ``say`` shows a line of text to the user.

        ``clock`` returns the time in seconds. It must be the same clock that gives the times ``End.at_s``.
        """
        self.host_of: Callable[[int], str] | None = None  # returns the host name of a rank; None: there is only one
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._announced: World | None = None  # the world that its members are about to begin
        self._generation = 0  # number of the last world that has begun
        self._members: tuple[int, ...] = ()  # ranks of that world
        self._steps: dict[int, int] = {}  # by rank: number of applied steps in its last message Register
        self._ends: dict[int, tuple[float, str]] = {}  # by rank that has failed and is not back: (time, host name)
        self._known: set[int] = set()  # ranks that were members of some world
        self._stopped_at_s: float | None = None  # the time at which the training stopped; None: it runs
        self._begun_s = 0.0
        self._losses = 0
        self._joins = 0
        self._still_s = 0.0
        self._changes: list[Change] = []

    # --- what happens

    def ended(self, end: End) -> None:
        """Record the end of a rank's process. Call this before the end is reported to the coordinator."""
        with self._lock:
            if end.failed:
                self._losses += 1
                self._ends[end.rank] = end.at_s, "" if self.host_of is None else self.host_of(end.rank)
                if end.rank in self._members:
                    self._stands_still(end.at_s)

    def heard(self, rank: int, message: ToCoordinator) -> None:
        """Record a message from ``rank`` to the coordinator. Call this before the coordinator gets the message."""
        if isinstance(message, Register):
            with self._lock:
                self._steps[rank] = message.steps
                if message.generation and rank in self._members:
                    self._stands_still(self._clock())

    def told(self, rank: int, message: FromCoordinator) -> None:
        """Record a message from the coordinator to ``rank``. If the message begins a world, show a line to the user."""
        if isinstance(message, World):
            with self._lock:
                self._announced = message
        elif isinstance(message, Welcome):
            with self._lock:
                world, self._announced = self._announced, None
                text = "" if world is None else self._begins(world)
            if text:
                self._say(text)

    # --- what was

    def summary(self) -> str:
        """Return a few lines of text about all changes of the world, or "" if there was at most one world."""
        with self._lock:
            if not self._changes:
                return ""
            whole_s = self._clock() - self._begun_s
            lines = [
                f"the job had {len(self._changes) + 1} worlds (ranks lost: {self._losses}, joined: {self._joins}); "
                f"the training stood still for {self._still_s:.2f} s of {whole_s:.1f} s"
            ]
            left_out = len(self._changes) - _MOST_ROWS
            if left_out > 0:
                lines.append(f"  {left_out} earlier {'change is' if left_out == 1 else 'changes are'} left out")
            rows = self._changes[-_MOST_ROWS:]
            width = max(len(f"{row.after_s:.1f}") for row in rows)
            return "\n".join([*lines, *(f"  {row.after_s:{width}.1f} s  {row.text}" for row in rows)])

    def status(self) -> str:
        """Return one line of text about the present world, or "" if no world has begun yet."""
        with self._lock:
            if not self._members:
                return ""
            count = len(self._members)
            since_s = 0.0 if self._stopped_at_s is None else self._clock() - self._stopped_at_s
            return (
                f"world {self._generation}: {count} {'rank' if count == 1 else 'ranks'}; ranks lost: {self._losses}, "
                f"joined: {self._joins}; stood still for {self._still_s + since_s:.2f} s"
            )

    # --- one world after another

    def _stands_still(self, at_s: float) -> None:
        if self._stopped_at_s is None:
            self._stopped_at_s = at_s

    def _begins(self, world: World) -> str:
        """Record that ``world`` has begun, and return the line of text for the user. It is "" for the first world."""
        now_s = self._clock()
        before, self._members, self._generation = self._members, world.members, world.generation
        if not before:
            self._begun_s = now_s
            self._known.update(world.members)
            self._forget_ends(world)
            return ""
        still_s = 0.0 if self._stopped_at_s is None else now_s - self._stopped_at_s
        self._still_s += still_s
        self._stopped_at_s = None
        parts = self._arrivals(before, world.members, now_s)
        gone = [rank for rank in before if rank not in world.members]
        steps = max((self._steps.get(rank, 0) for rank in world.members), default=0)
        count = len(world.members)
        parts.append(
            f"{count} {'rank goes' if count == 1 else 'ranks go'} on"
            f"{f' without {self._named(gone)}' if gone else ''}{f' after step {steps}' if steps > 0 else ''}"
        )
        parts.append(f"{'it' if count == 1 else 'they'} stood still for {still_s:.2f} s")
        text = f"world {world.generation}: {'; '.join(parts)}"
        self._changes.append(Change(now_s - self._begun_s, text))
        self._known.update(world.members)
        self._forget_ends(world)
        return text

    def _arrivals(self, before: Sequence[int], members: Sequence[int], now_s: float) -> list[str]:
        """Return phrases about the ranks in ``members`` that have joined or come back since the last world.

        ``before`` has the members of the last world, and ``now_s`` is the present time. The list is empty if no rank
        has joined or come back.
        """
        new = [rank for rank in members if rank not in self._known]
        back = [rank for rank in members if rank in self._known and (rank not in before or rank in self._ends)]
        self._joins += len(new) + len(back)
        words = []
        if back:
            waits = [now_s - self._ends[rank][0] for rank in back if rank in self._ends]
            since = f" {max(waits):.1f} s after the loss" if waits else ""
            words.append(f"{self._placed(back)} {'is' if len(back) == 1 else 'are'} back{since}")
        if new:
            words.append(f"{self._placed(new)} {'has' if len(new) == 1 else 'have'} joined")
        return words

    def _forget_ends(self, world: World) -> None:
        for rank in world.members:
            self._ends.pop(rank, None)

    def _named(self, gone: Sequence[int]) -> str:
        return _with_hosts(gone, [self._ends.get(rank, (0.0, ""))[1] for rank in gone])

    def _placed(self, ranks: Sequence[int]) -> str:
        return _with_hosts(ranks, ["" if self.host_of is None else self.host_of(rank) for rank in ranks])


def _with_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks in words, grouped by host, with the host names. In ``hosts``, "" means an unknown host."""
    ranks_on: dict[str, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        ranks_on.setdefault(host, []).append(rank)
    return " and ".join(f"{ranks_text(own)}{f' on {host}' if host else ''}" for host, own in ranks_on.items())
