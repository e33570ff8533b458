"""The states of the model of successions: processes, agents, coordinators and worlds, and how a part of a state changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Ballot = tuple[int, int]  # a world's generation, and the number of the coordinator that opened it
Name = tuple[int, int]  # a process as the coordinators call it: its place, and how many were there before it

NO_WORLD: Ballot = (0, 0)
FIRST_WORLD: Ballot = (1, 0)
ALIVE, DIED, LOST = 1, 0, -1  # of a process: it runs; its agent has seen its end; nobody can tell
OUT, WAITS, IN, DISMISSED = "out", "waits", "in", "dismissed"  # where a process is, see Process
GATHERS, SERVES, OVER, GONE = "gathers", "serves", "over", "gone"  # what a coordinator does
NOBODY = -1  # the coordinator of an agent that seeks a successor
LAUNCHER = 0  # the number of the launcher as a coordinator, and of its host

MUTANTS = (
    "counts what is over",  # a successor also counts older worlds that an agent tells after a rank has registered
    "counts the dismissed",  # who is dismissed has a vote for the world that opens without it
    "takes the dismissed for dead",  # who is dismissed counts as dead at once, not when its end is certain
    "begins too early",  # a coordinator takes a world for begun when the first member has received it
    "keeps only the newest",  # an agent forgets all worlds but the newest that it has heard of
    "takes a refusal for a loss",  # an agent does not count a host on which no port is open any more
    "members first",  # a member may receive a world before its agent has heard of it
    "ends at once",  # a coordinator without a quorum ends the job, though a process that runs could still give it one
    "forgets the dead",  # an agent does not tell a successor who has died
    "trusts the command",  # the launcher takes the end of the command that started an agent for the end of its processes
    "any state",  # a coordinator opens a world whose members have no state, or an older one than others had trained
    "no quorum",  # a coordinator opens a world with whoever has registered
    "looks at hosts alone",  # each agent decides whether its part is hopeless, not only the one that would start a successor
    "waits for no state",  # a successor ends the job while one that runs, and has not registered yet, may have the state
    "any first",  # each coordinator takes its own host's member for the first of a world, whoever has opened it
)


class Process(NamedTuple):
    """One process of a rank. Its index in ``State.processes`` is its true identity, whatever coordinators call it."""

    place: int
    start: int
    host: int
    life: int = ALIVE
    mode: str = (
        OUT  # OUT: new, or its registration is void; WAITS: registered; IN: in ``world``; DISMISSED: told to leave
    )
    offer: Ballot = NO_WORLD  # the world that answers its registration and is on its way
    world: Ballot = NO_WORLD  # the last world that it has received
    steps: Ballot = NO_WORLD  # the last world in which it could train: it stands for the number of steps of its state
    taken: Ballot = NO_WORLD  # the newest world of which it tells that all members have taken over the state

    @property
    def name(self) -> Name:
        return self.place, self.start


class Knowledge(NamedTuple):
    """What an agent or a coordinator knows of worlds."""

    worlds: tuple[Ballot, ...] = ()  # those that may live
    begun: Ballot = NO_WORLD  # the newest one that all its members are known to have received
    taken: Ballot = NO_WORLD  # the newest one whose members are known to have taken over the state


class News(NamedTuple):
    """What a coordinator tells its agents when a world opens, and again when it has begun."""

    ballot: Ballot
    begun: Ballot
    taken: Ballot


class Agent(NamedTuple):
    """The agent of one host. If ``is_there`` is false, host or agent is lost, and so are its processes."""

    is_there: bool = True
    side: int = 0  # of the split network
    boss: int = LAUNCHER
    heard: int = 1  # how much of the news of ``boss`` it has heard
    knows: Knowledge = Knowledge((FIRST_WORLD,), FIRST_WORLD, FIRST_WORLD)
    goes_to: int = NOBODY  # the host of the heir from which it expects to be taken over
    heirs: tuple[int, ...] = ()  # the hosts where a successor may begin, in their order
    bare: tuple[int, ...] = ()  # other hosts of the job: a successor has begun there before


class Coordinator(NamedTuple):
    """The launcher or a successor. Processes are given by their indexes in ``State.processes``."""

    host: int
    phase: str = GATHERS
    agents: tuple[int, ...] = ()  # hosts whose agents have come and are not given up
    told: Knowledge = Knowledge()  # what agents have told while it gathers
    knows: Knowledge = Knowledge()
    dead: tuple[Name, ...] = ()
    newest: Ballot = NO_WORLD  # the world that it has opened last or has taken over
    gone: tuple[int, ...] = ()  # members of ``newest`` that have left it or count as ended
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()  # those that are to be dismissed, in the order in which that was asked for
    news: tuple[News, ...] = ()  # what it has told its agents, in this order
    starts: tuple[int, ...] = ()  # by place: the highest start number that it has heard of
    unregistered: tuple[int, ...] = ()  # those that ran when it took over, and have not registered


class World(NamedTuple):
    members: tuple[int, ...]  # the first one decides between two halves
    received: tuple[int, ...]  # those that have received it
    parents: tuple[Ballot, ...]  # the worlds of which the coordinator knew that they live, or may live
    steps: Ballot  # the most steps that a member had when it opened
    is_taken: bool = False  # whether all members have taken over the state, so that they may train


class Budget(NamedTuple):
    """How much may still happen in a run."""

    deaths: int = 0
    hosts: int = 0
    crashes: int = 0  # of a coordinator alone
    splits: int = 0
    restarts: int = 0
    dismissals: int = 0
    hurries: int = 0  # a successor begins before all agents have come that could
    suspicions: int = 0  # an agent that can be reached is given up


NOTHING = Budget()


class State(NamedTuple):
    processes: tuple[Process, ...]
    agents: tuple[Agent, ...]  # by host
    coordinators: tuple[Coordinator | None, ...]  # by number: the launcher, then one for each host
    worlds: tuple[tuple[Ballot, World], ...]
    chain: tuple[Ballot, ...]  # the worlds that all of their members have received, in this order: they have begun
    budget: Budget


Worlds = Mapping[Ballot, World]  # those of a state


@dataclass(frozen=True)
class Config:
    """One job to explore, and what may happen to it.

    ``hosts`` has the host of each rank. The launcher runs on host 0, even if no rank runs there.
    """

    hosts: tuple[int, ...]
    may: Budget = NOTHING
    mutant: str = ""

    def __str__(self) -> str:
        may = [f"{name}={count}" for name, count in self.may._asdict().items() if count]
        return f"{'|'.join(map(str, self.hosts))} {' '.join([*may, *filter(None, [self.mutant])])}"


def first_state(config: Config) -> State:
    """Return the state in which all ranks train in the first world, and all agents and the launcher know that."""
    hosts = 1 + max(config.hosts)
    everyone = tuple(range(len(config.hosts)))
    first = FIRST_WORLD
    processes = tuple(
        Process(place, 0, host, ALIVE, IN, NO_WORLD, first, first, first) for place, host in enumerate(config.hosts)
    )
    launcher = Coordinator(
        LAUNCHER,
        SERVES,
        tuple(range(hosts)),
        knows=Knowledge((first,), first, first),
        newest=first,
        running=everyone,
        news=(News(first, first, first),),
        starts=(0,) * len(everyone),
    )
    order = tuple(sorted(everyone, key=lambda i: (config.hosts[i] != LAUNCHER, i)))
    worlds = ((first, World(order, everyone, (), NO_WORLD, True)),)
    agent = Agent(heirs=tuple(range(1, hosts)))
    return State(processes, (agent,) * hosts, (launcher, *(None for _ in range(hosts))), worlds, (first,), config.may)


def include(known: tuple[int, ...], *more: int) -> tuple[int, ...]:
    return tuple(sorted({*known, *more}))


def remains(one: Process, life: int) -> Process:
    """Return what is left of a process that does not run any more. All else is forgotten, so that fewer states differ.

    If it has registered, its coordinator has its steps, until it learns that the process has ended.
    """
    steps = one.steps if one.mode == WAITS or one.life != ALIVE else NO_WORLD
    return Process(one.place, one.start, one.host, life, steps=steps)


def ended(one: Coordinator, phase: str) -> Coordinator:
    """Return what is left of a coordinator that does not run any more."""
    return Coordinator(one.host, phase)


def without(one: Coordinator, lost: Collection[int]) -> Coordinator:
    """Return ``one`` after the processes ``lost`` have ended or were given up."""
    return one._replace(
        running=tuple(i for i in one.running if i not in lost),
        waiting=tuple(i for i in one.waiting if i not in lost),
        leaving=tuple(i for i in one.leaving if i not in lost),
        unregistered=tuple(i for i in one.unregistered if i not in lost),
        gone=include(one.gone, *lost) if one.phase == SERVES else one.gone,
    )


def without_agent(state: State, host: int) -> State:
    """Return ``state`` after ``host`` has lost its agent. Its processes end, too, and no coordinator is told of that."""
    lost = {i: remains(one, LOST) for i, one in enumerate(state.processes) if one.host == host and one.life != LOST}
    over = {
        number: ended(one, GONE)
        for number, one in enumerate(state.coordinators)
        if one is not None and one.host == host and one.phase != GONE
    }
    return put(state, lost, {host: Agent(False, 0, NOBODY, 0, Knowledge())}, over)


def spend(state: State, what: str) -> State:
    left: dict[str, Any] = {what: getattr(state.budget, what) - 1}
    return state._replace(budget=state.budget._replace(**left))


def put(
    state: State,
    processes: Mapping[int, Process] | None = None,
    agents: Mapping[int, Agent] | None = None,
    coordinators: Mapping[int, Coordinator] | None = None,
    worlds: Worlds | None = None,
) -> State:
    """Return ``state`` with other processes, agents, coordinators and worlds in the place of those with the same keys."""
    if processes:
        state = state._replace(processes=tuple(processes.get(i, one) for i, one in enumerate(state.processes)))
    if agents:
        state = state._replace(agents=tuple(agents.get(host, one) for host, one in enumerate(state.agents)))
    if coordinators:
        changed = tuple(coordinators.get(number, one) for number, one in enumerate(state.coordinators))
        state = state._replace(coordinators=changed)
    if worlds:
        state = state._replace(worlds=tuple(sorted({**dict(state.worlds), **worlds}.items())))
    return state
