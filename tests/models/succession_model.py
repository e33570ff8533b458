"""A model of succession: which worlds an elastic job opens when its launcher, and then its successors, are lost.

It leaves out the training. What is left is who knows of which world: processes, the agents of their hosts, and the
coordinators, of which the launcher is number 0 and the successor on host h is number 1 + h. Each move is one thing that
can happen at a time. What a coordinator announces reaches one agent after the other, and perhaps only some of them before
it is lost; an agent tells a successor only what it has heard; and processes of the agents that have come register with
the successor before it has heard of the others. So a successor knows as little as it can know. The promises are:

- each world that begins was opened by a coordinator that knew of the one before it, so two never live;
- a world that begins has a process with the state of the last one that has trained, if such a process runs at all;
- no coordinator and no agent ends a part of the job that could go on, and no run ends while such a part waits.

A world begins when its last member has received it, whether anybody knows that or not. Its coordinator sees that when all
members have said Hello; then they take over the newest state, and train. The rules are those of coordinator/quorum.py,
coordinator/membership.py and launch/agents/succession.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tests.models.explore import Violation
from tests.models.succession_coordinators import Coordinators, SuccessionMove
from tests.models.succession_rules import (
    answering,
    began,
    boss_of,
    could_go_on,
    hears_of,
    is_broken,
    is_served,
    looks_hopeless,
    reaches,
    runs,
    serves,
    united,
)
from tests.models.succession_state import (
    ALIVE,
    DIED,
    DISMISSED,
    GATHERS,
    GONE,
    IN,
    LAUNCHER,
    NO_WORLD,
    NOBODY,
    OUT,
    OVER,
    SERVES,
    WAITS,
    Agent,
    Config,
    Coordinator,
    Process,
    State,
    Worlds,
    ended,
    first_state,
    include,
    put,
    remains,
    spend,
    without,
    without_agent,
)


class Succession:
    """All moves of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mutant = config.mutant
        self._coordinators = Coordinators(config)

    def start(self) -> State:
        return first_state(self.config)

    def moves(self, state: State) -> Iterator[SuccessionMove]:
        """Yield everything that can happen next, with its name."""
        worlds = dict(state.worlds)
        for i, one in enumerate(state.processes):
            if one.life == ALIVE and is_served(state, one.host):
                yield from self._of_process(state, i, one, worlds)
        yield from self._take_over(state, worlds)
        for host, agent in enumerate(state.agents):
            if agent.is_there:
                yield from self._of_agent(state, host, agent, worlds)
        for number, coordinator in enumerate(state.coordinators):
            if coordinator is not None and runs(coordinator):
                yield from self._coordinators.moves(state, number, coordinator, worlds)
        yield from self._faults(state)

    # --- processes

    def _of_process(self, state: State, i: int, one: Process, worlds: Worlds) -> Iterator[SuccessionMove]:
        """Yield what the process ``one`` can do, whose agent has a coordinator."""
        agent = state.agents[one.host]
        if one.mode == OUT or (one.mode == IN and is_broken(state, one, worlds)):
            yield SuccessionMove(f"{i} registers at {agent.boss}", self._register(state, i, one, worlds))
            if one.mode == IN and worlds[one.world].is_taken and one.taken < one.world:
                # That all members have the state is a message, too, which may arrive before the failure, or not.
                sees = self._register(state, i, one._replace(taken=one.world), worlds)
                yield SuccessionMove(f"{i} registers at {agent.boss} and has seen {one.world}", sees)
        if one.mode == WAITS and one.offer != NO_WORLD and one.offer[1] == agent.boss:
            boss = boss_of(state, one.host)
            assert boss is not None
            knows = any(news.ballot == one.offer for news in boss.news[: agent.heard])
            if knows or self.mutant == "members first":
                yield SuccessionMove(f"{i} receives {one.offer}", self._receive(state, i, one, worlds))
        if one.mode == DISMISSED:
            yield SuccessionMove(f"{i} leaves for good", put(state, {i: remains(one, DIED)}))

    def _receive(self, state: State, i: int, one: Process, worlds: Worlds) -> State:
        """Return ``state`` after ``i`` has received the world that it is offered. It begins with its last member."""
        ballot = one.offer
        world = worlds[ballot]
        world = world._replace(received=include(world.received, i))
        after = put(state, {i: one._replace(mode=IN, world=ballot, offer=NO_WORLD)}, worlds={ballot: world})
        if set(world.members) != set(world.received):
            return after
        # Its last member may receive it when a part of the job has left it behind. It is then the one before theirs.
        older = max(key for key in state.chain if key < ballot)
        newer = min((key for key in state.chain if key > ballot), default=NO_WORLD)
        if older not in world.parents:
            raise Violation(f"world {ballot} begins beside {older}, of which its coordinator did not know")
        if newer != NO_WORLD and ballot not in worlds[newer].parents:
            raise Violation(f"world {ballot} begins beside {newer}, whose coordinator did not know of it")
        trained = max(key for key in state.chain if key < ballot and worlds[key].is_taken)
        holders = worlds[trained].members
        if not set(world.members) & set(holders) and any(state.processes[j].life == ALIVE for j in holders):
            raise Violation(f"nobody in world {ballot} has the state of {trained}")
        return after._replace(chain=tuple(sorted((*state.chain, ballot))))

    def _register(self, state: State, i: int, one: Process, worlds: Worlds) -> State:
        number = state.agents[one.host].boss
        coordinator = state.coordinators[number]
        assert coordinator is not None
        registered = {i: one._replace(mode=WAITS, offer=NO_WORLD)}
        if coordinator.phase == SERVES and i not in coordinator.running:
            return put(state, registered)  # it counts as ended, and gets no answer
        gone = coordinator.gone
        if coordinator.phase == SERVES and i in worlds[coordinator.newest].members:
            gone = include(gone, i)
        knows = began(coordinator.knows, one.taken, one.taken)
        unregistered = tuple(other for other in coordinator.unregistered if other != i)
        after = coordinator._replace(
            knows=knows, waiting=include(coordinator.waiting, i), gone=gone, unregistered=unregistered
        )
        return put(state, registered, coordinators={number: after})

    def _take_over(self, state: State, worlds: Worlds) -> Iterator[SuccessionMove]:
        """Yield the move after which all members of a world that has begun have the newest state, and train.

        They are let in when the coordinator has seen all of them.
        """
        for ballot in state.chain:
            world, coordinator = worlds[ballot], state.coordinators[ballot[1]]
            if world.is_taken or coordinator is None or not runs(coordinator) or coordinator.knows.begun < ballot:
                continue
            members = {i: state.processes[i] for i in world.members}
            if all(
                one.life == ALIVE
                and (one.mode, one.world) == (IN, ballot)
                and state.agents[one.host].boss == ballot[1]
                and is_served(state, one.host)
                for one in members.values()
            ):
                if ballot != state.chain[-1]:
                    raise Violation(f"the members of {ballot} train beside those of {state.chain[-1]}")
                trained = {i: one._replace(steps=ballot) for i, one in members.items()}
                after = put(state, trained, worlds={ballot: world._replace(is_taken=True)})
                yield SuccessionMove(f"all in {ballot} have the state", after)

    # --- agents

    def _of_agent(self, state: State, host: int, agent: Agent, worlds: Worlds) -> Iterator[SuccessionMove]:
        boss = boss_of(state, host)
        if boss is None:
            yield from self._awaits(state, host, agent, worlds)
        elif boss.phase == OVER and reaches(state, host, boss.host):
            yield SuccessionMove(f"agent {host} is told to end", without_agent(state, host))
        elif serves(state, agent.boss, host):
            if host not in boss.agents:
                yield SuccessionMove(f"agent {host} is told that it was given up", without_agent(state, host))
            elif agent.heard < len(boss.news):
                news = boss.news[agent.heard]
                told = "has begun" if news.begun == news.ballot else "opens"
                knows = hears_of(agent.knows, news, self.mutant)
                hears = put(state, agents={host: agent._replace(heard=agent.heard + 1, knows=knows)})
                yield SuccessionMove(f"agent {host} hears that {news.ballot} {told}", hears)
        elif host != LAUNCHER:
            yield self._look(state, host, agent, worlds)

    def _look(self, state: State, host: int, agent: Agent, worlds: Worlds) -> SuccessionMove:
        """Return that an agent loses its coordinator, or the heir that it has waited for, and looks for another heir."""
        lost = f"agent {host} loses {agent.boss if agent.boss != NOBODY else 1 + agent.goes_to}"
        heirs = answering(state, host, agent)
        # A host that refuses the connection has no port any more, but it lives.
        hosts = [other for other in agent.heirs if reaches(state, host, other)]
        if self.mutant == "takes a refusal for a loss":
            hosts = heirs
        # Only the heir itself looks, and the others leave the decision to it.
        leaves_to_heir = heirs[:1] != [host] and self.mutant != "looks at hosts alone"
        is_hopeless = not leaves_to_heir and looks_hopeless(state, host, agent, hosts, worlds, self.mutant)
        if not heirs or is_hopeless:
            # A host opens one port, for one successor. Where no host has such a port any more, nobody can go on.
            part = self._part(state, host)
            rest = [other for other in part if other != host]
            if heirs and self._could_go_on(state, part, worlds) and not self._could_go_on(state, rest, worlds):
                raise Violation(f"agent {host} ends, though its part of the job could go on")
            return SuccessionMove(f"{lost} and ends", without_agent(state, host))
        void = {
            i: one._replace(mode=OUT, offer=NO_WORLD)
            for i, one in enumerate(state.processes)
            if one.host == host and one.life == ALIVE and one.mode in (WAITS, DISMISSED)
        }
        goes = put(state, void, {host: agent._replace(boss=NOBODY, heard=0, goes_to=heirs[0])})
        number = 1 + heirs[0]
        if heirs[0] != host or state.coordinators[number] is not None:
            return SuccessionMove(f"{lost} and goes to {number}", goes)
        return SuccessionMove(f"{lost} and starts {number}", put(goes, coordinators={number: Coordinator(host)}))

    def _awaits(self, state: State, host: int, agent: Agent, worlds: Worlds) -> Iterator[SuccessionMove]:
        """Yield what becomes of an agent that has gone to an heir."""
        number = 1 + agent.goes_to
        heir = state.coordinators[number]
        if not reaches(state, host, agent.goes_to) or (heir is not None and not runs(heir)):
            yield self._look(state, host, agent, worlds)
        elif heir is not None and heir.phase == GATHERS:
            yield SuccessionMove(f"agent {host} comes to {number}", self._come(state, host, agent, number, heir))
        elif heir is not None:
            yield SuccessionMove(f"agent {host} comes too late to {number}", without_agent(state, host))

    def _come(self, state: State, host: int, agent: Agent, number: int, heir: Coordinator) -> State:
        own = [(i, one) for i, one in enumerate(state.processes) if one.host == host]
        alive = [(i, one) for i, one in own if one.life == ALIVE]
        dead = [] if self.mutant == "forgets the dead" else [one.name for _, one in own if one.life == DIED]
        worlds = dict(state.worlds)
        named = [state.processes[i] for ballot in agent.knows.worlds for i in worlds[ballot].members]
        starts = _raised(heir.starts or (0,) * len(self.config.hosts), named)
        heir = heir._replace(
            told=united(heir.told, agent.knows), dead=tuple(sorted({*heir.dead, *dead})), starts=starts
        )
        if any(one.start < starts[one.place] for _, one in alive):
            # Its coordinator had given it up, and had started another process at a place.
            return without_agent(put(state, coordinators={number: heir}), host)
        starts = _raised(starts, [one for _, one in own])
        older = {
            state.processes[i].host for i in heir.running if state.processes[i].start < starts[state.processes[i].place]
        }
        rest = without(heir, [i for i in heir.running if state.processes[i].host in older])
        after = rest._replace(
            agents=include(tuple(other for other in heir.agents if other not in older), host),
            running=include(rest.running, *(i for i, _ in alive)),
            starts=starts,
        )
        return put(
            state, agents={host: agent._replace(boss=number, heard=0, goes_to=NOBODY)}, coordinators={number: after}
        )

    # --- faults

    def _faults(self, state: State) -> Iterator[SuccessionMove]:
        budget = state.budget
        for i, one in enumerate(state.processes):
            if budget.deaths and one.life == ALIVE:
                died = put(state, {i: remains(one, DIED)})
                yield SuccessionMove(f"{i} dies", spend(died, "deaths"), is_fault=True)
        for host, agent in enumerate(state.agents):
            if budget.hosts and agent.is_there:
                lost = without_agent(state, host)
                yield SuccessionMove(f"host {host} is lost", spend(lost, "hosts"), is_fault=True)
        for number, coordinator in enumerate(state.coordinators):
            if budget.crashes and coordinator is not None and runs(coordinator):
                crashed = put(state, coordinators={number: ended(coordinator, GONE)})
                if number == LAUNCHER:  # its own ranks end with it
                    crashed = without_agent(crashed, LAUNCHER)
                yield SuccessionMove(f"{number} crashes", spend(crashed, "crashes"), is_fault=True)
        if budget.splits and not any(agent.side for agent in state.agents):
            for mask in range(1, 1 << (len(state.agents) - 1)):  # host 0 stays on side 0
                sides = {
                    host: agent._replace(side=mask >> (host - 1) & 1)
                    for host, agent in enumerate(state.agents)
                    if host and agent.is_there
                }
                if any(agent.side for agent in sides.values()):
                    after = spend(put(state, agents=sides), "splits")
                    yield SuccessionMove(f"the network splits: {mask:b}", after, is_fault=True)

    # --- promises

    def _part(self, state: State, host: int) -> list[int]:
        return [other for other in range(len(state.agents)) if reaches(state, host, other)]

    def _could_go_on(self, state: State, part: Collection[int], worlds: Worlds) -> bool:
        return could_go_on(state, self.config.may, part, worlds)

    def check(self, state: State) -> None:
        """Check nothing: what must hold at any moment is checked where a world begins, or where somebody ends."""

    def check_end(self, state: State) -> None:
        """Raise Violation if nothing can happen any more, and a part of the job waits that could go on."""
        worlds = dict(state.worlds)
        for host in range(len(state.agents)):
            part = self._part(state, host)
            own = [one for one in state.processes if one.host in part and one.life == ALIVE]
            trains = any((one.mode, one.world) == (IN, state.chain[-1]) for one in own)
            is_idle = any(one.mode != IN for one in own) and not trains
            if part and is_idle and self._could_go_on(state, part, worlds):
                raise Violation(f"the processes on hosts {part} wait for ever")


def _raised(starts: Sequence[int], processes: Collection[Process]) -> tuple[int, ...]:
    """Return ``starts``, by place, after one has heard of ``processes``."""
    highest = list(starts)
    for one in processes:
        highest[one.place] = max(highest[one.place], one.start)
    return tuple(highest)
