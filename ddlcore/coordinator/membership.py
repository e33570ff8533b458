"""Decides which processes form the next world of an elastic job, and which process's state all of them take over.

A world is a group of processes that train together. A *place* is a number that the launcher gives to a process. If the
process at a place dies, another process may be started at this place. A process registers when it has left its world,
because it has noticed a failure, or because all ranks leave at the same call of ``commit()``. A process that was
started while others train also registers. A new world opens when all living members of the last world have registered.
This module does no I/O. docs/design/elastic.md explains why no step and no sample is lost or done twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ddlcore.coordinator.known_steps import KnownSteps
from ddlcore.coordinator.present_world import PresentWorld
from ddlcore.coordinator.processes import Processes
from ddlcore.coordinator.quorum import Quorum
from ddlcore.coordinator.stall_table import on_ranks
from ddlcore.messages.elastic import Ballot, Complete, Dismissed, NextWorld, Opened, Process, Register
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_rank import Outgoing, Refused


@dataclass(frozen=True)
class MemberPatience:
    """The time limits, in seconds, for the registration of processes in an elastic job."""

    enough_s: float  # for as many as the least number of members; then the job ends
    first_s: float = 0.0  # for all processes before the first world; 0: without a limit
    warning_s: float = 0.0  # until the user is told which ranks keep the others waiting; 0: never
    evict_s: float = 0.0  # until these ranks are killed, so that the others go on; 0: never


@dataclass(frozen=True)
class Coordinating:
    """Which coordinator this is."""

    number: int = 0  # 0: the launcher; else it is a successor, and 1 + the number of the agent on whose host it runs
    host: int = -1  # index of the host on which it runs; -1: on none of the hosts that run ranks


class ElasticMembership:
    """The members of one elastic job. All methods must be called in one thread."""

    def __init__(
        self,
        hosts: Sequence[int],
        least: int,
        most: int,
        patience: MemberPatience,
        reset_limit: int = 0,
        quorum: Quorum | None = None,
        coordinator: Coordinating = Coordinating(),  # it is frozen
    ) -> None:
        """Create the object. No world is open yet.

        ``hosts`` has the index of the host for each place; -1 means that no process runs there. A world has ``least``
        members or more, and at most ``most``. ``reset_limit`` is how many worlds may follow the first one; 0 means any
        number. ``patience`` says how long members may take to register. ``quorum`` is given if another ``coordinator``
        may take the place of this one while this one lives, as when the network is split.
        """
        self.world = PresentWorld()  # the last one that has opened
        self._can_split = quorum is not None
        self._quorum = Quorum() if quorum is None else quorum
        self._coordinator = coordinator
        self._waits_for_agents = coordinator.number > 0  # until ``adopt``
        self._least = least
        self._most = most
        self._patience = patience
        self._reset_limit = reset_limit
        self._processes = Processes(hosts)
        self._known_steps = KnownSteps()
        self._leaving: dict[LaunchedRank, str] = {}  # places whose processes are to leave the training, and why
        self._waiting: dict[LaunchedRank, Register] = {}
        self._opened: Opened | None = None  # the announcement of the last world
        self._short_s: float | None = None  # since when there are too few processes
        self._told = False
        self._late_s: float | None = None  # since when processes wait for others that live
        self._told_late = False
        self._without: set[LaunchedRank] = set()  # living processes for which the first world does not wait
        self._hopes: set[LaunchedRank] = set()  # those whose registration or end may let this part of the job go on
        # Those that ran when this coordinator took over, and have not registered.
        self._unregistered: set[LaunchedRank] = set()
        self.evicted: dict[LaunchedRank, str] = {}  # places whose processes must be killed, and what is known of them
        self.complete = False  # whether the training has reached its end
        self.has_no_quorum = False  # whether another part of the job may go on
        self.over = ""  # why no world can open any more; "": one can

    # --- what happens

    def register(self, place: LaunchedRank, message: Register) -> Outgoing[LaunchedRank]:
        """Record the registration of the process at ``place``, and return the messages to send."""
        if self.over:
            return [(place, Refused(self.over))]
        if place not in self._processes.alive and not self._waits_for_agents:
            return []  # its process has ended since, and will enter no world
        self._note_taken(message.effective)
        self.world.leave(place, message.reason or "it has left for the next world")
        self._unregistered.discard(place)
        self._waiting[place] = message
        return self._decide()

    def adopt(
        self, worlds: Collection[Opened], running: Mapping[Process, int], ended: Collection[Process]
    ) -> Outgoing[LaunchedRank]:
        """Take over a job whose coordinator is lost, and return the messages to send. Before this, no world opens.

        ``worlds`` are those that agents have been told of, one at least. ``running`` has the processes that run on the
        hosts of these agents, with the indexes of the hosts; ``ended`` are those that have ended there. Processes may
        have registered before.
        """
        world = max(worlds, key=lambda one: one.ballot)
        self._waits_for_agents = False
        self._known_steps.has_begun = True
        self.complete = any(one.complete for one in worlds if one.ballot == world.ballot)
        self.world.open(world.ballot, world.places)
        self._opened = world
        known = [process for one in worlds for process in one.processes]
        self._processes.adopt(world.hosts, [*known, *ended], running)
        for one in worlds:
            self._known_steps.opened(one.ballot, one.steps)
            self._quorum.opened(one)
        self._known_steps.opened(world.ballot, world.steps)  # again, as the last one
        for ballot in {self._known_steps.taken, *(one.taken for one in worlds)}:
            self._note_taken(ballot)
        for one in worlds:
            self._quorum.began(one.effective)
        for process in ended:
            self._quorum.died(process)
        alive = self._processes.alive
        self._waiting = {place: message for place, message in self._waiting.items() if place in alive}
        self._unregistered = alive - self._waiting.keys()
        for place, start in world.processes:
            if (place, start) not in running:
                self.world.leave(place, "it has ended" if (place, start) in ended else "its host is lost")
        for place in self._waiting:
            self.world.leave(place, "it has lost the coordinator")
        return self._decide()

    def ended(self, place: LaunchedRank, reason: str, certain: bool = True) -> Outgoing[LaunchedRank]:
        """Record that the process at ``place`` has ended for ``reason``, and return the messages to send.

        ``certain`` is false if its host is only silent, so that the process may live.
        """
        if certain:
            self._quorum.died(self._processes.at(place))
        self._processes.ended(place, reason)
        self._unregistered.discard(place)
        self._leaving.pop(place, None)
        self._waiting.pop(place, None)
        self.world.leave(place, reason)
        return self._decide()

    def unheard(self, places: Collection[LaunchedRank], certain: bool) -> Outgoing[LaunchedRank]:
        """Record that the processes at ``places`` are lost with their host, before ``ended`` is called for each of them.

        So no world opens with some of them in between. ``certain``: see ``ended``. No messages are to be sent.
        """
        for place in places:
            if certain:
                self._quorum.died(self._processes.at(place))
            self._processes.alive.discard(place)
            self._unregistered.discard(place)
            self._waiting.pop(place, None)
        return []

    def started(self, place: LaunchedRank, host: int = -1) -> None:
        """Record that a new process was started at ``place`` on the host with the index ``host``.

        If ``host`` is -1, this is the host of the previous process at ``place``.
        """
        self._processes.started(place, host)
        self._waiting.pop(place, None)
        self.evicted.pop(place, None)
        self._without.discard(place)

    def dismiss(self, places: Collection[LaunchedRank], reason: str) -> Outgoing[LaunchedRank]:
        """Have the processes at ``places`` leave the training, and return the messages to send.

        The processes leave at a call of ``commit()`` on which all ranks agree. They stay as long as too few members
        would remain without them. ``reason`` says why the processes must leave, in words for the user.
        """
        self._leaving.update(dict.fromkeys((place for place in places if place in self._processes.alive), reason))
        return self._decide()

    def began(self, generation: int) -> None:
        """Record that all members of world ``generation`` have entered it."""
        self._known_steps.has_begun = True
        if generation == self.world.generation:
            self._quorum.began(self.world.ballot)

    def finished(self, generation: int) -> Outgoing[LaunchedRank]:
        """Record that all members of world ``generation`` have reached the end of the training.

        This is called because a member has reported it. Return the messages to send.
        """
        if 0 < generation == self.world.generation:
            self.complete = True
        return self._decide()

    def overdue(self, now_s: float) -> tuple[list[str], Outgoing[LaunchedRank]]:
        """Return lines for the user about waits that have lasted too long, and the messages to send because of them.

        ``now_s`` is the time of a steady clock.
        """
        if self._waits_for_agents:
            return [], []
        texts, outgoing = self._look_at_late(now_s)
        if texts or outgoing:
            return texts, outgoing
        limit_s = self._patience.enough_s
        if self._hopes and not self.over and not self.complete:
            if self._short_s is None:
                self._short_s = now_s
            return [], self._decide(patient=now_s - self._short_s < limit_s)
        # The first process of a place may take any time to load. If another one must take its place, time is running.
        loading = any(self.world.generation or self._processes.is_first(place) for place in self._missing())
        if self.over or self.complete or loading or len(self._waiting) >= self._least or not self._waiting:
            self._short_s, self._told = None, False
            return [], []
        if self._short_s is None:
            self._short_s = now_s
        text = f"{len(self._waiting)} of at least {self._least} ranks are there (--min-np)"
        if now_s - self._short_s >= limit_s:
            return [], self._end(f"{text}, and no others came within {limit_s:g} s (--elastic-timeout)")
        if self._told:
            return [], []
        self._told = True
        return [f"{text}; waiting for others, at most {limit_s:g} s (--elastic-timeout)"], []

    def _look_at_late(self, now_s: float) -> tuple[list[str], Outgoing[LaunchedRank]]:
        """Look for living processes that have not registered within the time limits of ``patience``.

        Return lines for the user about these processes, and the messages to send. ``now_s`` is the present time.
        """
        is_between_worlds = not self.world.generation or bool(self.world.gone)
        late = self._missing() if is_between_worlds and (self._waiting or self._hopes) else []
        if self.over or self.complete or not late:
            self._late_s, self._told_late = None, False
            return [], []
        if self._late_s is None:
            self._late_s = now_s
        waited_s, patience = now_s - self._late_s, self._patience
        if not self.world.generation:
            enough = len(self._waiting) >= self._least
            if not 0 < patience.first_s <= waited_s or not enough:
                return [], []
            self._without.update(late)
            text = f"the first world begins without {on_ranks(late)}, waited {waited_s:.0f} s (--start-timeout-s)"
            return [text], self._decide()
        if 0 < patience.evict_s <= waited_s:
            for place in late:
                self.evicted.setdefault(place, f"others waited {waited_s:.1f} s for it to come to the next world")
        if self._told_late or not 0 < patience.warning_s <= waited_s:
            return [], []
        self._told_late = True
        cause = next(iter(self.world.gone.items()), None)
        why = f" (rank {cause[0]} {cause[1]})" if cause is not None else ""
        text = f"the next world waits for {on_ranks(late)} since {waited_s:.0f} s{why}"
        return [text], []

    # --- questions

    def joiners(self) -> list[LaunchedRank]:
        """Return the places of waiting processes that can become members if all members leave the present world.

        The members then leave at a call of ``commit()`` on which all of them agree.
        """
        if not self._may_be_left():
            return []
        room = self._most - len(self.world.members) + len(self.leavers())
        return sorted(self._waiting.keys() - self._leaving.keys())[: max(0, room)]

    def leavers(self) -> list[LaunchedRank]:
        """Return the members that must leave the training and can do so now, because enough others remain.

        All members then leave the present world at a call of ``commit()`` on which all of them agree.
        """
        if not self._may_be_left():
            return []
        coming = len(self._waiting.keys() - self._leaving.keys())
        # One member must stay, because those that join copy the state of the training from a member.
        most = min(len(self.world.members) + coming - self._least, len(self.world.members) - 1)
        return sorted([place for place in self._leaving if self.world.has(place)][: max(0, most)])

    def _may_be_left(self) -> bool:
        """Return whether the members of the present world train, and another world may follow if they leave it."""
        ends = self.complete or bool(self.over) or self._is_last_world()
        return bool(self.world.generation) and not self.world.gone and not ends

    def opened(self) -> Opened | None:
        """Return what agents are to know of the world that opened last; None if no successor could use it."""
        if not self._can_split or self._opened is None:
            return None
        effective, taken = self._quorum.effective, self._known_steps.taken
        return msgspec.structs.replace(self._opened, effective=effective, taken=taken)

    def _announced(self, world: NextWorld) -> Opened:
        """Return the announcement of ``world``, which opens now. Its processes never change, whoever runs there later."""
        at_home = self._coordinator.host
        # Where two parts of the job have half of it each, the one with the coordinator goes on.
        order = sorted(world.members, key=lambda place: (world.hosts[place] != at_home, place))
        processes = tuple(self._processes.at(place) for place in order)
        steps, taken = self._known_steps.opened_with, self._known_steps.taken
        return Opened(world.ballot, processes, world.members, world.hosts, steps, self._quorum.effective, taken)

    def missing(self) -> list[LaunchedRank]:
        """Return the places whose processes must register before the next world opens; [] if no process waits."""
        if not self._waiting or (self.world.generation and not self.world.gone):
            return []
        return self._missing()

    # --- decisions

    def _missing(self) -> list[LaunchedRank]:
        """Return the places whose processes must still register before a world can open."""
        if not self.world.generation:
            return sorted(self._processes.alive - self._waiting.keys() - self._without)
        return self.world.present() or sorted(self._hopes)

    def _is_missing_some(self) -> bool:
        """Return whether ``_missing`` is not empty. It is asked at each registration, of which there are thousands."""
        if self.world.generation:
            return len(self.world.gone) < len(self.world.members)
        if len(self._processes.alive) > len(self._waiting) + len(self._without):
            return True
        return any(one not in self._waiting and one not in self._without for one in self._processes.alive)

    def _is_last_world(self) -> bool:
        """Return whether no further world may open, because of the limit of resets."""
        return 0 < self._reset_limit < self.world.generation

    def _note_taken(self, ballot: Ballot) -> None:
        """Record that all members of the world ``ballot`` have taken over the state, in their own memory."""
        self._quorum.began(ballot)
        self._known_steps.took_over(ballot)

    def _decide(self, patient: bool = True) -> Outgoing[LaunchedRank]:
        """Decide what follows from what is known now, and return the messages to send.

        If ``patient`` is false, this part of the job ends where it would wait for processes that may let it go on.
        """
        if self.over or self._waits_for_agents:
            return []
        if self.complete:
            done = [(place, Complete()) for place in sorted(self._waiting)]
            self._waiting.clear()
            return list(done)
        if self._is_missing_some():
            return []
        hoped, self._hopes = bool(self._hopes), set()
        stateless = self._known_steps.objection(self._waiting.values()) if self.world.generation else ""
        if stateless and self._unregistered and patient:
            # One of these may have the state: the coordinator before may have dismissed it, which it may not have heard.
            self._hope_for(self._unregistered, hoped)
            return []
        if stateless:
            return self._end(f"{stateless}{self._processes.causes()}")
        members = self._chosen()
        leaving = self._waiting.keys() & self._leaving.keys() - set(members)
        objection = self._objection(members)
        if objection and leaving and not self._objection(self._waiting):
            # Who is dismissed has a vote until it is certain that it has ended: it may never hear of its dismissal.
            self._hope_for(leaving, hoped)
            return self._dismissed(leaving)
        if objection:
            # Other processes that run in this part may be in its way: where one registers, it has a vote, and where it ends, none.
            running = self._processes.alive - self._waiting.keys()
            others = {place for place in running if self._quorum.counts(self._processes.at(place))}
            if patient and others and not self._objection(self._waiting.keys() | others):
                self._hope_for(others, hoped)
                return []
            return self._end(objection)
        if len(self._waiting) < self._least:
            return []
        return [*self._dismissed(leaving), *self._open(members)]

    def _chosen(self) -> list[LaunchedRank]:
        """Return the waiting processes that are to be members of the next world.

        Those that must leave are not, in the order in which they were told to, as far as enough others remain, and one of
        these has the newest state. Who has trained stays, if there are more processes than ranks.
        """
        waiting = self._waiting
        newest = max((one.steps for one in waiting.values()), default=-1)
        holders = {
            place
            for place, one in waiting.items()
            if one.steps == newest and (not self.world.generation or one.generation > 0)
        }
        staying = set(waiting)
        for place in self._leaving:
            if place in staying and len(staying) > self._least and holders != {place}:
                staying.discard(place)
                holders.discard(place)
        return sorted(sorted(staying, key=lambda place: (waiting[place].generation == 0, place))[: self._most])

    def _dismissed(self, places: Collection[LaunchedRank]) -> Outgoing[LaunchedRank]:
        """Dismiss the waiting processes at ``places``, and return the messages to send."""
        for place in places:
            del self._waiting[place]
        return [(place, Dismissed(self._leaving[place])) for place in sorted(places)]

    def _objection(self, places: Collection[LaunchedRank]) -> str:
        """Return why the processes at ``places`` may not form the next world; "" if they may."""
        return self._quorum.objection({self._processes.at(place) for place in places}) if self._can_split else ""

    def _hope_for(self, places: Collection[LaunchedRank], hoped: bool) -> None:
        """Begin to wait until the processes at ``places`` register or end. ``hoped`` is true if such a wait has begun before."""
        self._hopes = set(places)
        if not hoped:  # their time limits begin now, however long other processes were waited for
            self._late_s = self._short_s = None
            self._told_late = False

    def _open(self, members: Sequence[LaunchedRank]) -> Outgoing[LaunchedRank]:
        if self._is_last_world():
            return self._end(
                f"the job has begun anew {self._reset_limit} times (--reset-limit){self._processes.causes()}"
            )
        steps = max(self._waiting[one].steps for one in members)
        root = min(one for one in members if self._waiting[one].steps == steps)
        number, count = 1 + self.world.generation, len(self.world.members)
        hosts = tuple(self._processes.hosts)
        world = NextWorld(number, tuple(members), hosts, root, count, self._coordinator.number)
        self.world.open(world.ballot, world.members)
        self._known_steps.opened(world.ballot, steps)
        self._opened = self._announced(world)
        self._quorum.opened(self._opened)
        self._short_s = self._late_s = None
        self._told_late = False
        for one in members:
            del self._waiting[one]
        return [(one, world) for one in members]

    def _end(self, text: str) -> Outgoing[LaunchedRank]:
        self.over = text
        self.has_no_quorum = bool(self._objection(self._waiting))
        told = [(place, Refused(text)) for place in sorted(self._waiting)]
        self._waiting.clear()
        return list(told)
