"""The rules of the model of successions: who may vote, what agents keep, and which part of a job could go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tests.models.succession_state import (
    ALIVE,
    DIED,
    DISMISSED,
    GATHERS,
    IN,
    NO_WORLD,
    NOBODY,
    SERVES,
    Agent,
    Ballot,
    Budget,
    Coordinator,
    Knowledge,
    Name,
    News,
    Process,
    State,
    Worlds,
)

# --- votes and knowledge


def objects(
    worlds: Mapping[Ballot, tuple[Name, ...]], begun: Ballot, dead: Collection[Name], present: Collection[Name]
) -> bool:
    """Return whether ``present`` must not form a world.

    ``worlds`` has the members of each world that is known, and ``begun`` is the newest one that has begun.
    """
    if begun != NO_WORLD and begun not in worlds:
        return True
    for ballot, members in worlds.items():
        voters = [name for name in members if name not in dead]
        here = [name for name in voters if name in present]
        too_few = 2 * len(here) < len(voters) or (2 * len(here) == len(voters) and voters[:1] != here[:1])
        if too_few and ballot >= begun:
            return True
    return False


def began(knows: Knowledge, begun: Ballot, taken: Ballot) -> Knowledge:
    """Return ``knows`` after the news that all members have received ``begun``, and have the state of ``taken``."""
    begun = max(begun, taken, knows.begun)
    return Knowledge(tuple(key for key in knows.worlds if key >= begun), begun, max(taken, knows.taken))


def hears_of(knows: Knowledge, news: News, mutant: str = "") -> Knowledge:
    """Return what an agent knows after it has heard ``news``."""
    worlds = tuple(sorted(key for key in {*knows.worlds, news.ballot} if key >= news.begun))
    if mutant == "keeps only the newest":
        worlds = worlds[-1:]
    return Knowledge(worlds, max(knows.begun, news.begun), max(knows.taken, news.taken))


def united(one: Knowledge, two: Knowledge) -> Knowledge:
    """Return the knowledge of ``one`` and ``two`` together."""
    worlds = tuple(sorted({*one.worlds, *two.worlds}))
    return Knowledge(worlds, max(one.begun, two.begun), max(one.taken, two.taken))


def names(state: State, members: Iterable[int]) -> tuple[Name, ...]:
    return tuple(state.processes[i].name for i in members)


def chosen(state: State, one: Coordinator) -> tuple[int, ...]:
    """Return the waiting processes that are to be members of the next world of the coordinator ``one``.

    Those that are to leave are not, as far as one process remains, and one of those that remain has the newest state.
    """
    newest = max(state.processes[i].steps for i in one.waiting)
    holders = {i for i in one.waiting if state.processes[i].steps == newest and newest != NO_WORLD}
    staying = set(one.waiting)
    for i in one.leaving:
        if i in staying and len(staying) > 1 and holders != {i}:
            staying.discard(i)
            holders.discard(i)
    return tuple(sorted(staying))


def has_no_state(state: State, one: Coordinator, worlds: Worlds) -> bool:
    """Return whether no waiting process of the coordinator ``one`` has a state that a next world may take over."""
    newest = max((state.processes[i].steps for i in one.waiting), default=NO_WORLD)
    return _is_too_old(newest, one.knows.taken, worlds)


def _is_too_old(steps: Ballot, taken: Ballot, worlds: Worlds) -> bool:
    return steps == NO_WORLD or (taken != NO_WORLD and steps < worlds[taken].steps)


# --- who reaches whom


def reaches(state: State, host: int, other: int) -> bool:
    one, two = state.agents[host], state.agents[other]
    return one.is_there and two.is_there and one.side == two.side


def runs(one: Coordinator | None) -> bool:
    return one is not None and one.phase in (GATHERS, SERVES)


def boss_of(state: State, host: int) -> Coordinator | None:
    """Return the coordinator of the agent of ``host``, whether it can be reached or not; None if it seeks one."""
    boss = state.agents[host].boss
    return state.coordinators[boss] if boss != NOBODY else None


def serves(state: State, number: int, host: int) -> bool:
    """Return whether the coordinator ``number`` runs and can be reached from ``host``."""
    one = state.coordinators[number]
    return one is not None and runs(one) and reaches(state, one.host, host)


def is_served(state: State, host: int) -> bool:
    """Return whether the agent of ``host`` belongs to a coordinator that it can reach."""
    boss = boss_of(state, host)
    return boss is not None and serves(state, state.agents[host].boss, host) and host in boss.agents


def answering(state: State, host: int, agent: Agent) -> list[int]:
    """Return the heirs that accept connections from ``host``, in the order of succession."""
    return [
        heir
        for heir in agent.heirs
        if reaches(state, host, heir) and (state.coordinators[1 + heir] is None or runs(state.coordinators[1 + heir]))
    ]


def looks_hopeless(state: State, host: int, agent: Agent, heirs: Collection[int], worlds: Worlds, mutant: str) -> bool:
    """Return whether the agent of ``host`` ends at once, because ``heirs``, which answer, cannot be a quorum.

    It asks only for the newest world that it knows.
    """
    newest = max(agent.knows.worlds)
    members = worlds[newest].members
    if mutant == "any first":
        members = tuple(sorted(members, key=lambda i: state.processes[i].host != min(heirs)))
    there = {*heirs, *agent.bare}
    here = [i for i in members if state.processes[i].host in there]
    here += [i for i in members if state.processes[i].host == host and state.processes[i].life == ALIVE]
    return objects({newest: names(state, members)}, NO_WORLD, (), names(state, here))


def is_broken(state: State, one: Process, worlds: Worlds) -> bool:
    """Return whether a member may leave its world: it cannot go on, or all meet because somebody comes or leaves."""
    coordinator = boss_of(state, one.host)
    if coordinator is None or state.agents[one.host].boss != one.world[1] or coordinator.newest != one.world:
        return True
    if coordinator.waiting or coordinator.gone:
        return True
    indexes = set(worlds[one.world].members)
    if indexes & set(coordinator.leaving) and len(indexes) > 1:
        return True  # they meet at an agreed point, from which those go on that stay
    members = [state.processes[i] for i in indexes]
    return any(
        other.life != ALIVE
        or state.agents[other.host].side != state.agents[one.host].side
        or (other.world != one.world and other.offer != one.world)
        or (other.mode != IN and other.world == one.world)
        for other in members
    )


# --- promises


def could_go_on(state: State, may: Budget, hosts: Collection[int], worlds: Worlds) -> bool:
    """Return whether the processes on ``hosts`` could form a world, by all that is known on these hosts together.

    A coordinator may know less, but it must not end the job for that. Nothing is promised after a hurry or a suspicion.
    """
    if state.budget.hurries < may.hurries or state.budget.suspicions < may.suspicions:
        return False
    here = [one for one in state.processes if one.host in hosts]
    living = [one for one in here if one.life == ALIVE and one.mode != DISMISSED]
    dead = {one.name for one in here if one.life == DIED}
    knows = Knowledge()
    for host in hosts:
        knows = united(knows, state.agents[host].knows)
    for coordinator in state.coordinators:  # one of this part may know of deaths on hosts that are lost now
        if coordinator is not None and coordinator.host in hosts and runs(coordinator):
            dead |= set(coordinator.dead)
            knows = united(united(knows, coordinator.told), coordinator.knows)
    for one in living:
        seen = one.world if one.mode == IN and worlds[one.world].is_taken else one.taken
        knows = began(knows, seen, seen)
    if _is_too_old(max((one.steps for one in living), default=NO_WORLD), knows.taken, worlds):
        return False
    count = {ballot: names(state, worlds[ballot].members) for ballot in knows.worlds if ballot >= knows.begun}
    return not objects(count, NO_WORLD, dead, {one.name for one in living})
