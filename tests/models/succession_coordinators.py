"""What coordinators do in the model of successions: learn, gather their agents, open worlds, and end the job."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from tests.models.explore import Violation
from tests.models.succession_rules import (
    began,
    boss_of,
    chosen,
    could_go_on,
    has_no_state,
    hears_of,
    is_served,
    names,
    objects,
    reaches,
)
from tests.models.succession_state import (
    ALIVE,
    DIED,
    DISMISSED,
    GATHERS,
    LAUNCHER,
    NO_WORLD,
    OVER,
    SERVES,
    WAITS,
    Ballot,
    Config,
    Coordinator,
    Knowledge,
    News,
    Process,
    State,
    World,
    Worlds,
    ended,
    include,
    put,
    spend,
    without,
    without_agent,
)


class SuccessionMove(NamedTuple):
    """One thing that may happen. Processes are named by their indexes, coordinators by their numbers, agents by their hosts."""

    name: str
    after: State
    is_fault: bool = False


class Coordinators:
    """The moves of the coordinators of one configuration."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._mutant = config.mutant

    def moves(self, state: State, number: int, one: Coordinator, worlds: Worlds) -> Iterator[SuccessionMove]:
        """Yield what the coordinator ``one``, which runs, can do next. ``worlds`` are those of ``state``."""
        yield from self._learns_of_deaths(state, number, one)
        yield from self._gives_up(state, number, one)
        if one.phase == GATHERS:
            yield from self._gather(state, number, one, worlds)
            return
        yield from self._sees_begin(state, number, one, worlds)
        if not set(worlds[one.newest].members) - set(one.gone):
            yield from self._decide(state, number, one, worlds)
        yield from self._wishes(state, number, one)

    # --- what it learns

    def _learns_of_deaths(self, state: State, number: int, one: Coordinator) -> Iterator[SuccessionMove]:
        for i in one.running:
            process = state.processes[i]
            hears = is_served(state, process.host) and state.agents[process.host].boss == number
            if process.life == DIED and hears:
                knows = one._replace(dead=tuple(sorted({*one.dead, process.name})))
                yield SuccessionMove(f"{number} learns that {i} has died", _ends(state, number, knows, [i]))

    def _gives_up(self, state: State, number: int, one: Coordinator) -> Iterator[SuccessionMove]:
        for host in one.agents:
            is_lost = not reaches(state, one.host, host) or state.agents[host].boss != number
            if is_lost or (state.budget.suspicions and host != one.host):
                own = [i for i in one.running if state.processes[i].host == host]
                rest = one._replace(agents=tuple(other for other in one.agents if other != host))
                if self._mutant == "trusts the command" and number == LAUNCHER:
                    rest = rest._replace(dead=tuple(sorted({*rest.dead, *names(state, own)})))
                given_up = _ends(state, number, rest, own)
                if not is_lost:
                    given_up = spend(given_up, "suspicions")
                yield SuccessionMove(f"{number} gives up agent {host}", given_up, is_fault=not is_lost)

    def _sees_begin(self, state: State, number: int, one: Coordinator, worlds: Worlds) -> Iterator[SuccessionMove]:
        """Yield that all members of the newest world have said Hello, of which agents are told, too."""
        ballot = one.newest
        have_come = ballot in state.chain or (self._mutant == "begins too early" and worlds[ballot].received)
        if have_come and ballot[1] == number and ballot > one.knows.begun and not one.gone:
            after = one._replace(knows=began(one.knows, ballot, one.knows.taken))
            told = self._tell(state, number, after, ballot)
            yield SuccessionMove(f"{number} sees that {ballot} has begun", told)

    def _tell(self, state: State, number: int, one: Coordinator, ballot: Ballot) -> State:
        """Return ``state`` after coordinator ``number`` has become ``one`` and tells its agents of the world ``ballot``."""
        news = News(ballot, one.knows.begun, one.knows.taken)
        own = state.agents[one.host]
        state = put(state, coordinators={number: one._replace(news=(*one.news, news))})
        # What could come between is lost with both or with neither, except if the coordinator alone may be lost.
        is_last = own.boss == number and one.host in one.agents and own.heard == len(one.news)
        if is_last and not self._config.may.crashes:
            own = own._replace(heard=own.heard + 1, knows=hears_of(own.knows, news, self._mutant))
            state = put(state, agents={one.host: own})
        return state

    # --- the beginning of a successor

    def _gather(self, state: State, number: int, one: Coordinator, worlds: Worlds) -> Iterator[SuccessionMove]:
        come = [
            host
            for host in range(1, len(state.agents))
            if reaches(state, one.host, host) and host not in one.agents and not is_served(state, host)
        ]
        if not one.told.worlds or (come and not state.budget.hurries):
            return
        newest = max(one.told.worlds)
        knows = began(one.told, one.knows.begun, one.knows.taken)
        if self._mutant == "counts what is over" and one.knows.begun >= one.told.begun:
            knows = Knowledge(one.told.worlds, knows.begun, knows.taken)
        gone = [i for i in worlds[newest].members if i not in one.running or i in one.waiting]
        starts = list(one.starts)
        for i in {i for ballot in one.told.worlds for i in worlds[ballot].members}:
            starts[state.processes[i].place] = max(starts[state.processes[i].place], state.processes[i].start)
        after = one._replace(
            phase=SERVES,
            told=Knowledge(),
            knows=knows,
            newest=newest,
            gone=tuple(gone),
            waiting=tuple(i for i in one.waiting if i in one.running),
            starts=tuple(starts),
            unregistered=tuple(i for i in one.running if i not in one.waiting),
        )
        heirs = tuple(host for host in one.agents if host != one.host)
        bare = include(tuple(host for host in state.agents[one.host].bare if host in one.agents), one.host)
        agents = {
            host: state.agents[host]._replace(heirs=tuple(other for other in heirs if other not in bare), bare=bare)
            for host in one.agents
            if is_served(state, host) and boss_of(state, host) is one
        }
        begun = put(state, agents=agents, coordinators={number: after})
        yield SuccessionMove(f"{number} has gathered its agents", spend(begun, "hurries") if come else begun)

    # --- decisions

    def _decide(self, state: State, number: int, one: Coordinator, worlds: Worlds) -> Iterator[SuccessionMove]:
        """Yield how coordinator ``number`` goes on when all members of its world have left it: a new world, or the end."""
        if not one.waiting or (has_no_state(state, one, worlds) and self._mutant != "any state"):
            if one.unregistered and self._mutant != "waits for no state":
                return  # one of these may have the state
            yield self._end(state, number, one, worlds)
            return
        members = chosen(state, one)
        leaving = [i for i in one.waiting if i in one.leaving and i not in members]
        voters = one.waiting if self._mutant == "counts the dismissed" else members
        if self._mutant == "no quorum" or not self._objects(state, one, worlds, voters):
            yield SuccessionMove(
                f"{number} opens {(one.newest[0] + 1, number)} with {members}",
                self._open(state, number, one, members, leaving),
            )
        elif leaving and not self._objects(state, one, worlds, one.waiting):
            # They have a vote until their ends are certain. Until then, they are among those that may change the answer.
            rest = one._replace(waiting=members)
            if self._mutant == "takes the dismissed for dead":
                rest = rest._replace(dead=tuple(sorted({*rest.dead, *names(state, leaving)})))
            first = put(state, self._dismissed(state, number, leaving), coordinators={number: rest})
            yield SuccessionMove(f"{number} dismisses {tuple(leaving)} first", first)
        elif self._mutant == "ends at once" or not self._may_change(state, one, worlds):
            yield self._end(state, number, one, worlds)

    def _objects(self, state: State, one: Coordinator, worlds: Worlds, present: Collection[int]) -> bool:
        members = {}
        for ballot in one.knows.worlds:
            order = worlds[ballot].members
            if self._mutant == "any first":
                order = tuple(sorted(order, key=lambda i: _rank_at(state.processes[i], one.host)))
            members[ballot] = names(state, order)
        begun = NO_WORLD if self._mutant == "counts what is over" else one.knows.begun
        return objects(members, begun, one.dead, names(state, present))

    def _may_change(self, state: State, one: Coordinator, worlds: Worlds) -> bool:
        """Return whether processes that still run, and have a vote, would make a quorum if they registered."""
        may_vote = {i for ballot in one.knows.worlds for i in worlds[ballot].members} & set(one.running)
        others = may_vote - set(one.waiting)
        return bool(others) and not self._objects(state, one, worlds, {*one.waiting, *others})

    def _open(
        self, state: State, number: int, one: Coordinator, members: tuple[int, ...], leaving: Collection[int]
    ) -> State:
        ballot = one.newest[0] + 1, number
        order = sorted(members, key=lambda i: _rank_at(state.processes[i], one.host))
        steps = max(state.processes[i].steps for i in members)
        world = World(tuple(order), (), one.knows.worlds, steps)
        changed = {i: state.processes[i]._replace(offer=ballot) for i in members if self._is_waiting(state, number, i)}
        after = one._replace(
            knows=one.knows._replace(worlds=(*one.knows.worlds, ballot)), newest=ballot, gone=(), waiting=()
        )
        changed |= self._dismissed(state, number, leaving)
        return self._tell(put(state, changed, worlds={ballot: world}), number, after, ballot)

    def _dismissed(self, state: State, number: int, leaving: Collection[int]) -> dict[int, Process]:
        return {i: state.processes[i]._replace(mode=DISMISSED) for i in leaving if self._is_waiting(state, number, i)}

    def _is_waiting(self, state: State, number: int, i: int) -> bool:
        """Return whether the process ``i`` waits for an answer of coordinator ``number``.

        A process that has lost this coordinator meanwhile gets no answer to a registration that it has given up.
        """
        process = state.processes[i]
        return process.life == ALIVE and process.mode == WAITS and state.agents[process.host].boss == number

    def _end(self, state: State, number: int, one: Coordinator, worlds: Worlds) -> SuccessionMove:
        part = [host for host in one.agents if reaches(state, one.host, host)]
        if could_go_on(state, self._config.may, part, worlds):
            raise Violation(f"coordinator {number} ends the job, though its part could go on")
        over = put(state, coordinators={number: ended(one, OVER)})
        for host in part:
            if state.agents[host].boss == number:
                over = without_agent(over, host)
        return SuccessionMove(f"{number} ends the job", over)

    # --- what users and the host table ask for

    def _wishes(self, state: State, number: int, one: Coordinator) -> Iterator[SuccessionMove]:
        if state.budget.dismissals:
            for i in one.running:
                if i not in one.leaving:
                    asked = put(state, coordinators={number: one._replace(leaving=(*one.leaving, i))})
                    yield SuccessionMove(f"{number} wants {i} to leave", spend(asked, "dismissals"), is_fault=True)
        if state.budget.restarts:
            taken = {state.processes[i].place for i in one.running}
            for place in range(len(self._config.hosts)):
                for host in one.agents if place not in taken else ():
                    if is_served(state, host) and state.agents[host].boss == number:
                        yield self._restart(state, number, one, place, host)

    def _restart(self, state: State, number: int, one: Coordinator, place: int, host: int) -> SuccessionMove:
        starts = list(one.starts)
        starts[place] += 1
        process = Process(place, starts[place], host)
        i = len(state.processes)
        after = one._replace(starts=tuple(starts), running=include(one.running, i))
        begun = put(state, coordinators={number: after})._replace(processes=(*state.processes, process))
        return SuccessionMove(
            f"{number} starts {i} at place {place} on host {host}", spend(begun, "restarts"), is_fault=True
        )


def _ends(state: State, number: int, one: Coordinator, lost: Collection[int]) -> State:
    """Return ``state`` after coordinator ``number``, which is ``one``, has learned that the processes ``lost`` have ended."""
    forgets = {i: state.processes[i]._replace(steps=NO_WORLD) for i in lost if state.processes[i].life != ALIVE}
    return put(state, forgets, coordinators={number: without(one, lost)})


def _rank_at(process: Process, host: int) -> tuple[bool, int]:
    """Return by what the members of a world are ordered that opens on ``host``: the first one decides between two halves."""
    return process.host != host, process.place
