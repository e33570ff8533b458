"""Decides which ranks form a world: collects the ranks that have called ``init``, and gives each world a coordinator.

A world is the group of ranks that have called ``init`` together and exchange data until ``shutdown``. One launch may
contain many worlds: ``init`` and ``shutdown`` may be repeated, and ``init(comm=[ranks])`` makes a world of some of the
ranks. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.coordinator.entering import EnteringRanks, WorldKey
from ddlcore.coordinator.membership import ElasticMembership
from ddlcore.coordinator.running_world import RunningWorld
from ddlcore.coordinator.stall_table import on_ranks
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.errors import DdlInternalError
from ddlcore.messages.elastic import Finished, Register, WorldReport
from ddlcore.messages.observing import (
    Alive,
    Busy,
    Digests,
    Observation,
    ReplayStatus,
    Sample,
    Settle,
    Settled,
    Stack,
)
from ddlcore.messages.ranks import LaunchedRank, WorldRank
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
from ddlcore.messages.to_rank import Lost, Outgoing, Refused, Welcome
from ddlcore.runtime.clock import WatchedTime
from ddlcore.runtime.patience import Patience


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
        membership: ElasticMembership | None = None,
        term: str = "",
    ) -> None:
        """Create the object for a launch in which no world exists yet.

        ``driver`` searches for better settings, in one world at a time. ``refuses``: "", or why no world can begin.
        ``membership`` decides which worlds there are, if the launch is elastic. ``term`` tells the sessions of this
        coordinator from those of one that it succeeds.
        """
        self.size = size
        self._membership = membership
        self._stop_reason = ""  # why an elastic job is to stop: the worlds after the present one must do it, too
        self._driver = driver
        self._searched: RunningWorld | None = None
        self._compression = compression
        self._policy = policy
        self._patience = patience or Patience()
        self._entering = EnteringRanks(self._patience, refuses)
        self._due: Outgoing[LaunchedRank] = []
        self._replay = replay
        self._entered = WorldKey(((), 0))  # the world of an elastic job that its members enter
        self._worlds: dict[LaunchedRank, RunningWorld] = {}
        self._ended: dict[LaunchedRank, str] = {}
        self._lost: dict[LaunchedRank, str] = {}
        self._made = 0
        self._term = term
        self._time = WatchedTime()
        self._dead: dict[LaunchedRank, str] = {}

    def handle(self, rank: LaunchedRank, message: ToCoordinator) -> Outgoing[LaunchedRank]:
        """Handle ``message`` from ``rank``, a rank of the launch, and return the messages to send."""
        if isinstance(message, Hello):
            return self._hello(rank, message)
        if isinstance(message, Register):
            return self._register(rank, message)
        if isinstance(message, Finished):
            return [] if self._membership is None else self._membership.finished(message.generation)
        if isinstance(message, Observation):
            return []  # the parts that need this message have got it before
        world = self._worlds.get(rank)
        if world is None:
            if isinstance(message, Settle):
                return [(rank, Settled())]
            return self._entering.give_up(rank, message.waited_s) if isinstance(message, Bye) else []
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

    def rank_ended(self, rank: LaunchedRank, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        """Record that the process of ``rank`` has ended, and return the messages to send.

        This is a failure, unless the rank had sent Done or no world will need it. ``certain`` is false if the host of the
        rank is only silent.
        """
        self._ended[rank] = reason
        if self._entering.awaits(rank) or rank in self._worlds:
            self._lost.setdefault(rank, reason)
        outgoing = self._detach(rank, reason, f"{reason}, before init was complete")
        if self._membership is not None:
            outgoing += self._membership.ended(rank, reason, certain)
        return outgoing

    def rank_started(self, rank: LaunchedRank, host: int = -1) -> Outgoing[LaunchedRank]:
        """Record that a new process was started for ``rank``, and return the messages to send.

        ``host`` is the index of the new process's host; -1 means the host of the previous process of ``rank``.
        """
        self._ended.pop(rank, None)
        self._lost.pop(rank, None)
        self._dead.pop(rank, None)
        if self._membership is not None:
            self._membership.started(rank, host)
        return []

    def dismiss(self, ranks: Collection[LaunchedRank], reason: str) -> Outgoing[LaunchedRank]:
        """Have ``ranks`` leave the training of an elastic job, and return the messages to send.

        The ranks leave at a call of ``commit()`` on which all ranks agree. ``reason`` says why, in words for the user.
        """
        if self._membership is None:
            return []
        return self._membership.dismiss(ranks, reason) + self._ask_to_let_in()

    def _detach(self, rank: LaunchedRank, reason: str, before_init: str) -> Outgoing[LaunchedRank]:
        """Remove ``rank`` from its world, or from the world for which it waits in ``init``.

        Return messages which inform the other ranks of the loss of ``rank``. Messages to the ranks of its world contain
        ``reason``. Messages to ranks that wait in ``init`` contain ``before_init`` as the reason.
        """
        outgoing = self._entering.lost(rank, before_init)
        world = self._worlds.pop(rank, None)
        if world is not None:
            world.active.discard(rank)
            world.watch.gone(world.inward[rank])
            outgoing += world.agree(rank, None) + world.point(rank, None)
            outgoing += world.outward(world.coordinator.lost(world.inward[rank], reason))
        return outgoing

    def _register(self, rank: LaunchedRank, message: Register) -> Outgoing[LaunchedRank]:
        if self._membership is None:
            return [(rank, Refused("this job is not elastic; start it by `ddl run --min-np N`"))]
        if message.protocol != PROTOCOL:
            return [(rank, Refused(_other_version(rank, message.version, message.protocol)))]
        reason = message.reason or "it has left for the next world"
        self._lost.pop(rank, None)  # it lives; who waited for it has been told
        return self._detach(rank, reason, reason) + self._membership.register(rank, message) + self._ask_to_let_in()

    def _ask_to_let_in(self) -> Outgoing[LaunchedRank]:
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
            if world.key[1] == self._membership.world.generation:
                return world.asked(COMMIT, ", ".join(changes))
        return []

    def lost(self) -> dict[LaunchedRank, str]:
        """Return the ranks that were lost so far, with the reason for each."""
        return dict(self._lost)

    def overdue(self, now_s: float) -> list[str]:
        """Return a report about each wait that has become too long since the last call of this method.

        ``now_s`` is the time of a steady clock. ``due`` then returns the messages to send.
        """
        now_s = self._time.at(now_s)
        reports = []
        for world in {id(world): world for world in self._worlds.values()}.values():
            texts, inner = world.watch.look(now_s)
            inner += world.agreement.look(now_s)
            reports += texts
            self._due += [(rank, told) for rank, told in world.outward(inner) if rank in world.active]
            self._dead.update({world.key[0][rank]: text for rank, text in world.watch.dead.items()})
        if self._membership is not None:
            texts, outgoing = self._membership.overdue(now_s)
            reports += texts
            self._due += outgoing
        texts, outgoing, dead = self._entering.overdue(now_s)
        self._due += outgoing
        self._dead.update(dead)
        return reports + texts

    def dead(self) -> dict[LaunchedRank, str]:
        """Return the ranks that did not answer when a stall ended the job, each with a text that describes its silence.

        Such a rank cannot end by itself: its process must be killed. For an elastic job, the result also contains the
        ranks that must be killed because they did not register for the next world.
        """
        evicted = {} if self._membership is None else self._membership.evicted
        return {**evicted, **self._dead}

    def due(self) -> Outgoing[LaunchedRank]:
        """Return the messages that must be sent because of the last call of ``overdue``. Each is returned only once."""
        due, self._due = self._due, []
        return due

    def _hello(self, rank: LaunchedRank, hello: Hello) -> Outgoing[LaunchedRank]:
        if self._membership is not None:
            return self._hello_of_member(rank, hello, self._membership)
        text = self._objection(rank, hello)
        if text:
            return [(rank, Refused(text))]
        gone = [ended for ended in self._ended if ended in hello.ranks]  # the rank that ended first is the cause
        if gone:
            self._lost.setdefault(gone[0], self._ended[gone[0]])
            at = WorldRank(hello.ranks.index(gone[0]))
            return [(rank, Lost((at,), f"{self._ended[gone[0]]}, before init was complete"))]
        return self._enter(WorldKey((hello.ranks, hello.ordinal)), rank, hello)

    def _hello_of_member(
        self, rank: LaunchedRank, hello: Hello, membership: ElasticMembership
    ) -> Outgoing[LaunchedRank]:
        """Take the Hello of a member of a world of an elastic job, and return the messages to send."""
        if hello.protocol != PROTOCOL:
            return [(rank, Refused(_other_version(rank, hello.version, hello.protocol)))]
        present = membership.world
        broken = present.broken(hello.ordinal)
        if broken is not None:
            place, reason = broken
            at = present.members.index(place) if hello.ordinal == present.generation else 0
            return [(rank, Lost((WorldRank(at),), reason))]
        if hello.ranks or not present.has(rank) or rank in self._worlds:
            return [(rank, Refused(f"rank {rank} cannot enter world {hello.ordinal} of this elastic job"))]
        if self._entered[1] != hello.ordinal:
            self._entered = WorldKey((present.members, hello.ordinal))
        return self._enter(self._entered, rank, hello)

    def _objection(self, rank: LaunchedRank, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return _other_version(rank, hello.version, hello.protocol)
        if hello.rank != rank or rank not in hello.ranks or not 0 <= min(hello.ranks) <= max(hello.ranks) < self.size:
            return f"rank {rank} cannot be part of a world of ranks {list(hello.ranks)} among {self.size}"
        if rank in self._worlds:
            return f"rank {rank} is in a running job already; call shutdown() before init()"
        return ""

    def _enter(self, key: WorldKey, rank: LaunchedRank, hello: Hello) -> Outgoing[LaunchedRank]:
        hellos, outgoing = self._entering.enter(key, rank, hello)
        return self._begin(key, hellos) if hellos else outgoing

    def _begin(self, key: WorldKey, hellos: Mapping[LaunchedRank, Hello]) -> Outgoing[LaunchedRank]:
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
        patience = self._patience
        if patience.shutdown_s <= 0:  # a rank may have a limit of its own, such as the timeout of its process group
            patience = replace(patience, shutdown_s=first.stall_shutdown_s)
        world = RunningWorld(key, coordinator, patience, set(key[0]))
        if free:
            self._searched = world
        for rank in key[0]:
            self._worlds[rank] = world
        if self._membership is not None:
            self._membership.began(key[1])
        report = None if self._membership is None else WorldReport(key[1], len(key[0]))
        welcome = Welcome(f"world{self._term}{self._made}", report)  # one object, so that it is encoded once
        told: Outgoing[LaunchedRank] = [(rank, welcome) for rank in key[0]]
        again = world.asked(STOP, self._stop_reason) if self._membership is not None and self._stop_reason else []
        return told + again + self._ask_to_let_in()


def _other_version(rank: LaunchedRank, version: str, protocol: int) -> str:
    return (
        f"rank {rank} runs ddlcore {version} (protocol {protocol}), "
        f"the launcher protocol {PROTOCOL}; install the same version of ddlcore for both"
    )
