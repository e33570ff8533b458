"""Decides which ranks form a world: collects the ranks that have called ``init``, and gives each world a coordinator.

A world is the group of ranks that have called ``init`` together and exchange data until ``shutdown``. One launch may
contain many worlds: ``init`` and ``shutdown`` may be repeated, and ``init(comm=[ranks])`` makes a world of some of the
ranks. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.coordinator.agreed_point import AgreedPoint
from ddlcore.coordinator.agreement import Agreement
from ddlcore.coordinator.awaited import Awaited, Details
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.coordinator.membership import Membership
from ddlcore.coordinator.stall import StallWatch
from ddlcore.coordinator.stall_table import on_ranks
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.errors import DdlInternalError
from ddlcore.messages.elastic import Finished, Register, WorldReport
from ddlcore.messages.observing import (
    Alive,
    Busy,
    Digests,
    Profile,
    Pulse,
    ReplayStatus,
    Sample,
    Settle,
    Settled,
    Stack,
)
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import (
    COMMIT,
    STOP,
    Bye,
    CallCount,
    Done,
    Frozen,
    Hello,
    Leave,
    Paused,
    Request,
    StopRequest,
    ToCoordinator,
)
from ddlcore.messages.to_rank import Farewell, FromCoordinator, Lost, Refused, Welcome
from ddlcore.runtime.clock import WatchedTime
from ddlcore.runtime.patience import Patience

Outgoing = list[tuple[int, FromCoordinator]]


class WorldKey(tuple[tuple[int, ...], int]):
    """The ranks of a world, and a count of the worlds of exactly these ranks.

    Its hash is computed once: each of thousands of ranks that enter a world is looked up by it.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass
class _World:
    key: WorldKey
    coordinator: Coordinator
    patience: Patience
    active: set[int]  # the launched ranks that have not sent Done
    leaving: set[int] = field(default_factory=set)  # those of ``active`` that have sent Bye

    def __post_init__(self) -> None:
        ranks = range(len(self.key[0]))
        self.points = {kind: AgreedPoint(kind, ranks) for kind in (STOP, COMMIT)}
        self.agreement = Agreement(len(self.key[0]), self.coordinator.sets, lambda: self.coordinator.table.joined)
        self.inward = {launched: rank for rank, launched in enumerate(self.key[0])}  # launched rank: rank in this world
        self.watch = StallWatch(self._awaited, ranks, self.patience, ranks)

    def _awaited(self) -> list[Awaited]:
        """Return everything for which somebody in this world waits.

        The coordinator waits for ranks, and ranks wait for agreed calls and in ``shutdown``. Ranks that still run after
        other ranks have left are in the list, too.
        """
        waits = self.coordinator.awaited()
        for point in self.points.values():
            waits += point.awaited()
        own = {rank: self.inward[rank] for rank in sorted(self.active)}
        leaving = tuple(one for rank, one in own.items() if rank in self.leaving and self.coordinator.parted(one))
        if leaving:
            text = "in shutdown()"
            asked = "to let go of everything (Farewell)"
            waits.append(Awaited(("leaving", leaving), text, asked, lambda: Details(leaving), only_silent=True))
        staying = tuple(one for rank, one in own.items() if rank not in self.leaving)
        if staying and len(self.active) < len(self.key[0]):
            text = "after other ranks have left"
            rest = Awaited(
                ("staying", staying),
                text,
                "for a sign of life",
                lambda: Details(staying),
                only_silent=True,
                ends=self.patience.evicts,
            )
            waits.append(rest)
        return waits

    def agree(self, launched: int, message: Digests | Sample | Settle | None) -> Outgoing:
        """Handle the report of a rank about its model parameters, and return the messages to send.

        ``launched`` is the rank's number in the launch. ``message`` is None if the rank will send no more reports.
        """
        rank, agreement = self.inward[launched], self.agreement
        if isinstance(message, Digests):
            return self.outward(agreement.hear(rank, message))
        if isinstance(message, Sample):
            return self.outward(agreement.sampled(rank, message))
        if isinstance(message, Settle):
            return self.outward(agreement.settle(rank))
        return self.outward(agreement.gone(rank))

    def point(self, launched: int, message: StopRequest | CallCount | None) -> Outgoing:
        """Handle a rank's message about a call at which all ranks act together, and return the messages to send.

        ``launched`` is the rank's number in the launch. ``message`` is None if the rank has left the world. See
        coordinator.agreed_point.
        """
        rank, joined = self.inward[launched], self.coordinator.table.joined
        if isinstance(message, StopRequest):
            return self.asked(STOP, message.reason)
        if isinstance(message, CallCount):
            return self.outward(self.points[message.kind].counted(rank, message, joined))
        return self.outward([told for point in self.points.values() for told in point.gone(rank, joined)])

    def asked(self, kind: str, reason: str) -> Outgoing:
        """Have the ranks agree at which call of ``kind`` they act, and return the messages to send.

        ``reason`` says why, in words for the user.
        """
        return self.outward(self.points[kind].asked(reason))

    def outward(self, outgoing: Outgoing) -> Outgoing:
        """Return ``outgoing`` with the ranks' numbers in the launch instead of their numbers in this world."""
        return [(self.key[0][rank], message) for rank, message in outgoing]


class Sessions:
    """The worlds of one launch of ``size`` ranks, and the ranks that wait in ``init`` for a world to begin."""

    def __init__(
        self,
        size: int,
        policy: FusionPolicy,
        patience: Patience | None = None,
        replay: bool = True,
        driver: SearchDriver | None = None,
        compression: str = "none",
        refuses: str = "",
        membership: Membership | None = None,
        term: str = "",
    ) -> None:
        """Create the object for a launch in which no world exists yet.

        ``driver`` searches for better settings, in one world at a time. ``refuses``: "", or why no world can begin.
        ``membership`` decides which worlds there are, if the launch is elastic. ``term`` tells the sessions of this
        coordinator from those of one that it succeeds.
        """
        self.size = size
        self._refuses = refuses
        self._membership = membership
        self._stop_reason = ""  # why an elastic job is to stop: the worlds after the present one must do it, too
        self._driver = driver
        self._searched: _World | None = None
        self._compression = compression
        self._policy = policy
        self._patience = patience or Patience()
        self._due: Outgoing = []
        self._replay = replay
        self._gathering: dict[WorldKey, dict[int, Hello]] = {}
        self._entered = WorldKey(((), 0))  # the world of an elastic job that its members enter
        self._worlds: dict[int, _World] = {}  # by launched rank
        self._ended: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._made = 0
        self._term = term
        self._time = WatchedTime()
        self._init_watches: dict[WorldKey, StallWatch] = {}
        self._dead: dict[int, str] = {}

    def handle(self, rank: int, message: ToCoordinator) -> Outgoing:
        """Handle ``message`` from ``rank``, a rank of the launch, and return the messages to send."""
        if isinstance(message, Hello):
            return self._hello(rank, message)
        if isinstance(message, Register):
            return self._register(rank, message)
        if isinstance(message, Finished):
            return [] if self._membership is None else self._membership.finished(message.generation)
        if isinstance(message, (Pulse, Profile)):
            return []  # the parts that need these messages have got them before
        world = self._worlds.get(rank)
        if world is None:
            if isinstance(message, Settle):
                return [(rank, Settled())]
            return self._give_up(rank, message.waited_s) if isinstance(message, Bye) else []
        world.watch.spoke(world.inward[rank])
        if isinstance(message, Done):
            world.active.discard(rank)
            world.watch.gone(world.inward[rank])
            del self._worlds[rank]
            return []
        if isinstance(message, (Stack, Alive)):
            world.watch.hear(world.inward[rank], message)
            return []
        if isinstance(message, (Digests, Sample, Settle)):
            return world.agree(rank, message)
        if isinstance(message, (StopRequest, CallCount)):
            if isinstance(message, StopRequest):
                self._stop_reason = self._stop_reason or message.reason
            return world.point(rank, message)
        if not isinstance(message, (Request, Bye, Leave, Frozen, ReplayStatus, Busy, Paused)):
            raise DdlInternalError(f"rank {rank} sent {type(message).__name__} in the middle of a job")
        if isinstance(message, Bye):
            world.leaving.add(rank)
            if message.broken:
                self._lost[rank] = message.reason
            told = world.agree(rank, None) + world.point(rank, None)
            return told + world.outward(world.coordinator.handle(world.inward[rank], message))
        return world.outward(world.coordinator.handle(world.inward[rank], message))

    def rank_ended(self, rank: int, reason: str, certain: bool = True) -> Outgoing:
        """Record that the process of ``rank`` has ended, and return the messages to send.

        This is a failure, unless the rank had sent Done or no world will need it. ``certain`` is false if the host of the
        rank is only silent.
        """
        self._ended[rank] = reason
        if any(rank in key[0] for key in self._gathering) or rank in self._worlds:
            self._lost.setdefault(rank, reason)
        outgoing = self._detach(rank, reason, f"{reason}, before init was complete")
        if self._membership is not None:
            outgoing += self._membership.ended(rank, reason, certain)
        return outgoing

    def rank_started(self, rank: int, host: int = -1) -> Outgoing:
        """Record that a new process was started for ``rank``, and return the messages to send.

        ``host`` is the index of the new process's host; -1 means the host of the previous process of ``rank``.
        """
        self._ended.pop(rank, None)
        self._lost.pop(rank, None)
        self._dead.pop(rank, None)
        if self._membership is not None:
            self._membership.started(rank, host)
        return []

    def dismiss(self, ranks: Collection[int], reason: str) -> Outgoing:
        """Have ``ranks`` leave the training of an elastic job, and return the messages to send.

        The ranks leave at a call of ``commit()`` on which all ranks agree. ``reason`` says why, in words for the user.
        """
        if self._membership is None:
            return []
        return self._membership.dismiss(ranks, reason) + self._let_in()

    def _detach(self, rank: int, reason: str, before_init: str) -> Outgoing:
        """Remove ``rank`` from its world, or from the world for which it waits in ``init``.

        Return messages which inform the other ranks of the loss of ``rank``. Messages to the ranks of its world contain
        ``reason``. Messages to ranks that wait in ``init`` contain ``before_init`` as the reason.
        """
        outgoing: Outgoing = []
        for key in [key for key in self._gathering if rank in key[0]]:
            present = self._gathering.pop(key)
            lost = Lost((key[0].index(rank),), before_init)
            outgoing += [(other, lost) for other in present if other != rank]
        world = self._worlds.pop(rank, None)
        if world is not None:
            world.active.discard(rank)
            world.watch.gone(world.inward[rank])
            outgoing += world.agree(rank, None) + world.point(rank, None)
            outgoing += world.outward(world.coordinator.lost(world.inward[rank], reason))
        return outgoing

    def _register(self, rank: int, message: Register) -> Outgoing:
        if self._membership is None:
            return [(rank, Refused("this job is not elastic; start it by `ddl run --min-np N`"))]
        if message.protocol != PROTOCOL:
            return [(rank, Refused(_other_version(rank, message.version, message.protocol)))]
        reason = message.reason or "it has left for the next world"
        self._lost.pop(rank, None)  # it lives; who waited for it has been told
        return self._detach(rank, reason, reason) + self._membership.register(rank, message) + self._let_in()

    def _let_in(self) -> Outgoing:
        """Have all members leave the present world of an elastic job, if the members of the next world can be others.

        This is so if a process waits to join, or if a member must leave the training. The members leave at a call of
        ``commit()`` on which all of them agree. Return the messages to send.
        """
        if self._membership is None:
            return []
        joiners, leavers = self._membership.joiners(), self._membership.leavers()
        changes = [f"{on_ranks(ranks)} can {what}" for ranks, what in ((joiners, "join"), (leavers, "leave")) if ranks]
        if not changes:
            return []
        for world in self._worlds.values():
            if world.key[1] == self._membership.generation:
                return world.asked(COMMIT, ", ".join(changes))
        return []

    def lost(self) -> dict[int, str]:
        """Return the ranks that were lost so far, with the reason for each."""
        return dict(self._lost)

    def overdue(self, now_s: float) -> list[str]:
        """Return a report about each wait that has become too long since the last call of this method.

        ``now_s`` is the time of a steady clock. ``due`` then returns the messages to send.
        """
        now_s = self._time.at(now_s)
        reports = []
        for world in {id(world): world for world in self._worlds.values()}.values():
            texts, outgoing = world.watch.look(now_s)
            outgoing += world.agreement.look(now_s)
            reports += texts
            self._due += [(rank, told) for rank, told in world.outward(outgoing) if rank in world.active]
            self._dead.update({world.key[0][rank]: text for rank, text in world.watch.dead.items()})
        if self._membership is not None:
            texts, outgoing = self._membership.overdue(now_s)
            reports += texts
            self._due += outgoing
        return reports + self._overdue_in_init(now_s)

    def _overdue_in_init(self, now_s: float) -> list[str]:
        """Return reports about worlds that cannot begin, because some of their ranks have not called ``init``."""
        known, self._init_watches = self._init_watches, {}
        reports = []
        for key, present in list(self._gathering.items()):
            watch = known.get(key) or self._watch_of_init(key)
            texts, outgoing = watch.look(now_s)
            reports += texts
            self._init_watches[key] = watch
            self._due += [(rank, told) for rank, told in outgoing if rank in present]
            if watch.over:
                self._dead.update(watch.dead)
                del self._gathering[key]
        return reports

    def _watch_of_init(self, key: WorldKey) -> StallWatch:
        present = self._gathering[key]

        def details() -> Details:
            missing = tuple(rank for rank in key[0] if rank not in present)
            return Details(missing, notes=(f"{on_ranks(sorted(present))} called init() and wait for the others",))

        why = "it may be stopped, or busy with what comes before its init()"
        wait = Awaited(("init", key), "in init()", "to call init()", details, why=why)
        return StallWatch(lambda: [wait], key[0], self._patience, ())

    def dead(self) -> dict[int, str]:
        """Return the ranks that did not answer when a stall ended the job, each with a text that describes its silence.

        Such a rank cannot end by itself: its process must be killed. For an elastic job, the result also contains the
        ranks that must be killed because they did not register for the next world.
        """
        evicted = {} if self._membership is None else self._membership.evicted
        return {**evicted, **self._dead}

    def due(self) -> Outgoing:
        """Return the messages that must be sent because of the last call of ``overdue``. Each is returned only once."""
        due, self._due = self._due, []
        return due

    def _hello(self, rank: int, hello: Hello) -> Outgoing:
        if self._membership is not None:
            return self._hello_of_member(rank, hello, self._membership)
        text = self._objection(rank, hello)
        if text:
            return [(rank, Refused(text))]
        key = WorldKey((hello.ranks, hello.ordinal))
        gone = [ended for ended in self._ended if ended in hello.ranks]  # the rank that ended first is the cause
        if gone:
            self._lost.setdefault(gone[0], self._ended[gone[0]])
            return [(rank, Lost((hello.ranks.index(gone[0]),), f"{self._ended[gone[0]]}, before init was complete"))]
        self._gathering.setdefault(key, {})[rank] = hello
        return self._begin_or_refuse(key)

    def _hello_of_member(self, rank: int, hello: Hello, membership: Membership) -> Outgoing:
        """Take the Hello of a member of a world of an elastic job, and return the messages to send."""
        if hello.protocol != PROTOCOL:
            return [(rank, Refused(_other_version(rank, hello.version, hello.protocol)))]
        members = membership.members
        broken = membership.broken(hello.ordinal)
        if broken is not None:
            place, reason = broken
            return [(rank, Lost((members.index(place) if hello.ordinal == membership.generation else 0,), reason))]
        if hello.ranks or not membership.has(rank) or rank in self._worlds:
            return [(rank, Refused(f"rank {rank} cannot enter world {hello.ordinal} of this elastic job"))]
        if self._entered[1] != hello.ordinal:
            self._entered = WorldKey((members, hello.ordinal))
        key = self._entered
        self._gathering.setdefault(key, {})[rank] = hello
        return self._begin_or_refuse(key)

    def _objection(self, rank: int, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return _other_version(rank, hello.version, hello.protocol)
        if hello.rank != rank or rank not in hello.ranks or not 0 <= min(hello.ranks) <= max(hello.ranks) < self.size:
            return f"rank {rank} cannot be part of a world of ranks {list(hello.ranks)} among {self.size}"
        if rank in self._worlds:
            return f"rank {rank} is in a running job already; call shutdown() before init()"
        return ""

    def _begin_or_refuse(self, key: WorldKey) -> Outgoing:
        present = self._gathering[key]
        if len(present) == len(key[0]):
            if self._refuses:  # not before all have come: so all get the refusal, and none waits for another
                return [(rank, Refused(self._refuses)) for rank in self._gathering.pop(key)]
            return self._begin(key)
        cycle = self._cycle(key) if len(self._gathering) > 1 else set()
        if not cycle:
            return []
        asked = {rank: other[0] for other in cycle for rank in self._gathering.pop(other)}
        table = "\n".join(f"  rank {rank} asked for ranks {list(ranks)}" for rank, ranks in sorted(asked.items()))
        text = (
            f"init: the ranks wait for each other in different worlds\n{table}\n"
            "  what next: pass the same comm on every rank"
        )
        return [(rank, Refused(text)) for rank in asked]

    def _cycle(self, start: WorldKey) -> set[WorldKey]:
        """Return the worlds, including ``start``, whose ranks wait for each other in a cycle.

        Such worlds can never begin. The result is empty if there is no cycle.
        """

        def awaited(key: WorldKey) -> set[WorldKey]:
            missing = set(key[0]) - set(self._gathering[key])
            return {other for other, present in self._gathering.items() if other != key and missing & set(present)}

        def reach(key: WorldKey) -> set[WorldKey]:
            seen: set[WorldKey] = set()
            todo = awaited(key)
            while todo:
                other = todo.pop()
                if other not in seen:
                    seen.add(other)
                    todo |= awaited(other)
            return seen

        return {other for other in reach(start) if start in reach(other)} | {start} if start in reach(start) else set()

    def _give_up(self, rank: int, waited_s: float) -> Outgoing:
        """Return the messages that end the wait of ``rank`` in ``init``. They name the ranks that are missing there.

        If ``waited_s`` is not 0, the time limit of ``rank`` has passed after ``waited_s`` seconds. Then the wait of all
        ranks that wait for the same world ends, and that world is forgotten. If ``waited_s`` is 0, ``rank`` leaves for
        another reason, and the other ranks keep waiting.
        """
        for key, present in self._gathering.items():
            if rank in present:
                who = ", ".join(str(other) for other in key[0] if other not in present)
                text = f"rank {who} of {list(key[0])} had not called init() by then"
                if waited_s <= 0:
                    del present[rank]
                    return [(rank, Refused(text))]
                del self._gathering[key]
                refused = Refused(f"{text}; waited {waited_s:g} s (DDL_START_TIMEOUT_S)", late=True)
                return [(other, refused) for other in sorted(present)]
        return [(rank, Farewell())]

    def _begin(self, key: WorldKey) -> Outgoing:
        hellos = self._gathering.pop(key)
        self._made += 1
        first = hellos[key[0][0]]
        free = self._searched is None or not self._searched.active
        coordinator = Coordinator(
            len(key[0]),
            self._policy,
            first.fusion_bytes,
            self._replay,
            first.first_bucket_bytes,
            first.overlap,
            self._driver if free else None,
            self._compression,
            first.join_average,
        )
        world = _World(key, coordinator, self._patience, set(key[0]))
        if free:
            self._searched = world
        for rank in key[0]:
            self._worlds[rank] = world
        if self._membership is not None:
            self._membership.began(key[1])
        report = None if self._membership is None else WorldReport(key[1], len(key[0]))
        welcome = Welcome(f"world{self._term}{self._made}", report)  # one object, so that it is encoded once
        told: Outgoing = [(rank, welcome) for rank in key[0]]
        again = world.asked(STOP, self._stop_reason) if self._membership is not None and self._stop_reason else []
        return told + again + self._let_in()


def _other_version(rank: int, version: str, protocol: int) -> str:
    return (
        f"rank {rank} runs ddlcore {version} (protocol {protocol}), "
        f"the launcher protocol {PROTOCOL}; install the same version of ddlcore for both"
    )
