"""Record how the world of an elastic job changes, for the user and for the ranks. It decides nothing.

The launcher sees all that it needs: the ends of processes, the registrations for the next world, and the welcome with
which a world begins. The welcome takes what is known of the world to its ranks, for their statistics and timelines.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from ddlcore.launch.ranks.exit_status import End
from ddlcore.messages.elastic import NextWorld, Opened, Register, WorldReport
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_coordinator import ToCoordinator
from ddlcore.messages.to_rank import FromCoordinator, Welcome
from ddlcore.text.ranks import ranks_text

_MOST_ROWS = 10  # limit for the rows of the summary; the oldest rows are left out


@dataclass(frozen=True)
class Change:
    """The beginning of a world other than the first: its time, and the line of text for the user."""

    after_s: float  # seconds from the beginning of the first world
    text: str


@dataclass(frozen=True)
class FailedRank:
    """The end of a rank's process that has failed."""

    at_s: float
    host: str  # "": there is one host only
    how: str  # in words that follow the rank, such as "died (SIGKILL)"


class History:
    """The worlds of one elastic job, as they are told to the user and to the ranks.

    The supervisor's thread calls ``ended``, and the control server's thread calls ``heard`` and ``told``. Any thread
    may call ``summary`` and ``status``.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        host_of: Callable[[LaunchedRank], str] = lambda rank: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a world. ``say`` shows a line of text to the user.

        ``host_of`` returns the host name of a rank, or "" if there is one host only; any thread may call it.
        ``clock`` returns the time in seconds. It must be the same clock that gives the times ``End.at_s``.
        """
        self._say = say
        self._host_of = host_of
        self._clock = clock
        self._lock = threading.Lock()
        self._announced: NextWorld | None = None  # the world that its members are about to begin
        self._generation = 0  # of the last world that has begun
        # The members of that world, in order. It is a dict because a search in thousands of members must be quick.
        self._members: dict[LaunchedRank, None] = {}
        self._registered: dict[LaunchedRank, Register] = {}  # by rank: its last registration
        self._reason: tuple[LaunchedRank, str] | None = None  # the rank that was the first to leave the world, and why
        self._ends: dict[LaunchedRank, FailedRank] = {}  # by rank that is not back
        self._known: set[LaunchedRank] = set()  # ranks that were members of some world
        self._stopped_at_s: float | None = None  # the time at which the training stopped; None: it runs
        self._begun_s = 0.0
        self._losses = 0
        self._joins = 0
        self._still_s = 0.0
        self._changes: list[Change] = []
        self._report: WorldReport | None = None  # on the last world that has begun

    # --- what happens

    def ended(self, end: End) -> None:
        """Record the end of a rank's process. Call this before the end is reported to the coordinator."""
        with self._lock:
            if end.failed:
                self._losses += 1
                self._ends[end.rank] = FailedRank(end.at_s, self._host_of(end.rank), _how(end))
                if end.rank in self._members:
                    self._stands_still(end.at_s)

    def heard(self, rank: LaunchedRank, message: ToCoordinator) -> None:
        """Record a message from ``rank`` to the coordinator. Call this before the coordinator gets the message."""
        if isinstance(message, Register):
            with self._lock:
                self._registered[rank] = message
                if message.generation and rank in self._members:
                    if message.reason and self._reason is None:
                        self._reason = rank, message.reason
                    self._stands_still(self._clock())

    def told(self, message: FromCoordinator) -> FromCoordinator:
        """Take a message of the coordinator to a rank. Returns the message to send: a welcome gets the report on its world."""
        if isinstance(message, NextWorld):
            with self._lock:
                self._announced = message
        elif isinstance(message, Welcome):
            with self._lock:
                world, self._announced = self._announced, None
                if world is not None:
                    self._report = self._begins(world)
                report = self._report
            if world is not None and report is not None and report.text:
                self._say(report.text)
            return msgspec.structs.replace(message, report=report)
        return message

    def goes_on(self, world: Opened, running: Collection[LaunchedRank]) -> None:
        """Begin with ``world``, the last one of a launcher that is lost. The processes of ``running`` still run."""
        with self._lock:
            self._members, self._generation = dict.fromkeys(world.places), world.ballot[0]
            self._known.update(world.places, running)
            self._begun_s = self._clock()
            lost = [rank for rank in world.places if rank not in running]
            for rank in lost:
                self._ends[rank] = FailedRank(self._begun_s, self._host_of(rank), "lost with the launcher or before it")
            self._losses, self._joins = world.ranks_lost + len(lost), world.ranks_joined
            self._still_s = world.seconds_lost
            self._stands_still(self._begun_s)

    def add_totals(self, world: Opened) -> Opened:
        """Return ``world`` with the totals of this history, for the case that a successor goes on with it."""
        with self._lock:
            return msgspec.structs.replace(
                world, ranks_lost=self._losses, ranks_joined=self._joins, seconds_lost=self._still_s
            )

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

    def _begins(self, world: NextWorld) -> WorldReport:
        """Record that all members of ``world`` are there. Returns the report on it, whose text is for the user."""
        now_s = self._clock()
        before, self._members, self._generation = self._members, dict.fromkeys(world.members), world.generation
        if not before:
            self._begun_s = now_s
            report = WorldReport(world.generation, len(world.members), ranks_lost=self._losses)
        else:
            report = self._changed(before, world, now_s)
            self._changes.append(Change(now_s - self._begun_s, report.text))
        self._stopped_at_s = self._reason = None
        self._known.update(world.members)
        for rank in world.members:
            self._ends.pop(rank, None)
        return report

    def _changed(self, before: Collection[LaunchedRank], world: NextWorld, now_s: float) -> WorldReport:
        """Return the report on ``world``, which follows on that of the members ``before``, and add to the totals."""
        members = self._members
        new = [rank for rank in members if rank not in self._known]
        back = [rank for rank in members if rank in self._known and (rank not in before or rank in self._ends)]
        lost = [rank for rank in before if rank in self._ends]
        left = [rank for rank in before if rank not in members and rank not in self._ends]
        still_s = 0.0 if self._stopped_at_s is None else now_s - self._stopped_at_s
        self._joins += len(new) + len(back)
        self._still_s += still_s
        steps, again = self._steps(members)
        count = len(members)
        parts = [
            *self._departures([rank for rank in lost if rank not in members], left),
            *self._arrivals(new, back, now_s),
            *([] if lost or left or new or back else self._first_reason()),
            f"{count} {'rank goes' if count == 1 else 'ranks go'} on{_after(steps, again)}",
            f"{'it' if count == 1 else 'they'} stood still for {still_s:.2f} s",
        ]
        return WorldReport(
            world.generation,
            count,
            tuple(lost),
            tuple(sorted([*new, *back])),
            tuple(left),
            again,
            still_s,
            self._losses,
            self._joins,
            self._still_s,
            f"world {world.generation}: {'; '.join(parts)}",
        )

    def _steps(self, members: Collection[LaunchedRank]) -> tuple[int, int]:
        """Return how many steps the state of the new world contains, and how many after these are computed again.

        These are the steps that a member had begun, or applied and then given up.
        """
        known = [self._registered[rank] for rank in members if rank in self._registered]
        steps = max((one.steps for one in known), default=0)
        begun = max((one.steps + one.again for one in known), default=0)
        return max(0, steps), max(0, begun - steps) if steps >= 0 else 0

    # --- in words

    def _departures(self, lost: Sequence[LaunchedRank], left: Sequence[LaunchedRank]) -> list[str]:
        """Return the words about members of the last world that have failed, and about those that have left."""
        alike: dict[str, list[LaunchedRank]] = {}
        for rank in lost:
            alike.setdefault(self._ends[rank].how, []).append(rank)
        words = [f"{_with_hosts(own, [self._ends[rank].host for rank in own])} {how}" for how, own in alike.items()]
        return words + ([f"{self._placed(left)} {'has' if len(left) == 1 else 'have'} left"] if left else [])

    def _arrivals(self, new: Sequence[LaunchedRank], back: Sequence[LaunchedRank], now_s: float) -> list[str]:
        """Return the words about members that were in no world before, and about those that are back."""
        words = []
        if back:
            waits = [now_s - self._ends[rank].at_s for rank in back if rank in self._ends]
            since = f" {max(waits):.1f} s after the loss" if waits else ""
            words.append(f"{self._placed(back)} {'is' if len(back) == 1 else 'are'} back{since}")
        if new:
            words.append(f"{self._placed(new)} {'has' if len(new) == 1 else 'have'} joined")
        return words

    def _first_reason(self) -> list[str]:
        if self._reason is None:
            return []
        rank, reason = self._reason
        return [f"{self._placed([rank])} has left the last one ({reason})"]

    def _placed(self, ranks: Sequence[LaunchedRank]) -> str:
        return _with_hosts(ranks, [self._host_of(rank) for rank in ranks])


def _with_hosts(ranks: Sequence[LaunchedRank], hosts: Sequence[str]) -> str:
    """Return the ranks in words, grouped by host, with the host names. In ``hosts``, "" means an unknown host."""
    ranks_on: dict[str, list[LaunchedRank]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        ranks_on.setdefault(host, []).append(rank)
    return " and ".join(f"{ranks_text(own)}{f' on {host}' if host else ''}" for host, own in ranks_on.items())


def _after(steps: int, again: int) -> str:
    """Return the words about the steps so far, of which ``again`` steps after step ``steps`` are computed again."""
    if again == 1:
        return f"; step {steps + 1} is computed again"
    if again:
        return f"; steps {steps + 1}-{steps + again} are computed again"
    return f" after step {steps}" if steps > 0 else ""


def _how(end: End) -> str:
    """Return how a rank has failed, in words that follow the rank."""
    if end.lost:
        return f"was lost ({end.lost})"
    if end.returncode >= 0:
        return f"died (exit code {end.returncode})"
    by = " by the launcher" if end.silent else ""
    try:
        return f"died ({signal.Signals(-end.returncode).name}{by})"
    except ValueError:  # real-time signals have no name
        return f"died (signal {-end.returncode}{by})"
