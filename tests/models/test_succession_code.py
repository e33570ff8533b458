"""The rules of the model of successions are those of the code."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlcore.coordinator.quorum import Quorum
from ddlcore.launch.agents.succession import Succession
from ddlcore.launch.agents.wire import Handover, Heir
from ddlcore.messages.elastic import Ballot, Opened, Process
from ddlcore.messages.ranks import FIRST_START, LaunchedRank
from tests.models.succession_code import followed
from tests.models.succession_rules import hears_of, looks_hopeless, objects
from tests.models.succession_state import DIED, FIRST_WORLD, NO_WORLD, Budget, Config, Knowledge, News, first_state, put
from tests.runtime.effort import examples
from tests.tiers import long

PROCESSES: st.SearchStrategy[Process] = st.tuples(st.integers(0, 5), st.integers(0, 1))
BALLOTS: st.SearchStrategy[Ballot] = st.tuples(st.integers(1, 4), st.integers(0, 2))
WORLDS = st.dictionaries(BALLOTS, st.lists(PROCESSES, min_size=1, max_size=6, unique=True), max_size=4)
FOLLOWED = [
    Config((0, 0, 1, 1), Budget(deaths=1, hosts=1, restarts=1, dismissals=2)),
    Config((0, 1, 2, 3), Budget(deaths=2, hosts=2, splits=1, restarts=1, dismissals=1)),
    Config((1, 2, 3), Budget(deaths=2, hosts=2, restarts=2, dismissals=2, suspicions=1)),
    Config((1, 2, 3), Budget(deaths=1, hosts=2, restarts=2)),
    Config((1, 2, 3), Budget(splits=1, hosts=2, restarts=1, suspicions=1)),
    Config((0, 1, 1, 2, 2, 3), Budget(deaths=2, hosts=2, crashes=1, splits=1, restarts=1, dismissals=1, hurries=1)),
]


def opened(
    ballot: Ballot, processes: Sequence[Process] = ((LaunchedRank(0), FIRST_START),), begun: Ballot = NO_WORLD
) -> Opened:
    places = tuple(sorted(place for place, _ in processes))
    return Opened(ballot, tuple(processes), places, (0,) * 6, 5, begun)


@examples(300)
@given(WORLDS, st.lists(BALLOTS, max_size=2), st.sets(PROCESSES), st.sets(PROCESSES), st.randoms())
def test_votes(
    worlds: Mapping[Ballot, Sequence[Process]],
    begun: list[Ballot],
    dead: set[Process],
    present: set[Process],
    chance: random.Random,
) -> None:
    """What a coordinator learns of worlds may come in any order."""
    quorum = Quorum()
    events = [(ballot, True) for ballot in worlds] + [(ballot, False) for ballot in begun]
    chance.shuffle(events)
    for ballot, opens in events:
        if opens:
            quorum.opened(opened(ballot, worlds[ballot]))
        else:
            quorum.began(ballot)
    for process in dead:
        quorum.died(process)
    members = {ballot: tuple(processes) for ballot, processes in worlds.items()}
    assert objects(members, max(begun, default=NO_WORLD), dead, present) == bool(quorum.objection(present))


@examples(200)
@given(st.lists(st.tuples(BALLOTS, BALLOTS)))
def test_which_worlds_an_agent_keeps(news: list[tuple[Ballot, Ballot]]) -> None:
    agent, model = Succession(0), Knowledge()
    for ballot, begun in news:
        agent.hears_of(opened(ballot, begun=begun))
        model = hears_of(model, News(ballot, begun, NO_WORLD))
        assert sorted(one.ballot for one in agent.worlds) == list(model.worlds)


@examples(200)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.sets(st.integers(1, 4)),
    st.integers(1, 4),
    st.sets(st.integers(0, 5)),
)
def test_when_an_agent_ends_at_once(at: list[int], heirs: set[int], host: int, died: set[int]) -> None:
    """The agent of ``host`` asks whether those on the hosts ``heirs``, and its own that have not ``died``, may be a quorum."""
    config = Config((*at, 4))
    state = first_state(config)
    state = put(state, {i: one._replace(life=DIED) for i, one in enumerate(state.processes) if i in died})
    worlds = dict(state.worlds)
    order = [state.processes[i].name for i in worlds[FIRST_WORLD].members]
    running = [one.name for i, one in enumerate(state.processes) if one.host == host and i not in died]
    agent = Succession(host)
    agent.hears_of(Opened(FIRST_WORLD, tuple(order), tuple(range(len(order))), config.hosts, 5, FIRST_WORLD))
    found = [Heir(one, f"host{one}", "tcp://127.0.0.1:1", "", (), "127.0.0.1", 1) for one in sorted(heirs)]
    names = tuple((f"host{one}", 1) for one in range(5))
    handover = Handover(tuple(found), "", "", {}, names, len(order), len(order), "ssh", ("127.0.0.1", 1), "")
    model = looks_hopeless(state, host, state.agents[host], heirs, worlds, "")
    assert model == bool(agent._objection(handover, found, running))


@pytest.mark.parametrize(
    ("config", "runs"), [*((one, 40) for one in FOLLOWED), *long(*((one, 300) for one in FOLLOWED))], ids=str
)
def test_the_code_decides_as_the_model_does(config: Config, runs: int) -> None:
    """In random runs, code and model open the same worlds, dismiss the same ranks, and end where the other one ends."""
    decisions = followed(config, runs, seed=20)
    assert len(decisions) == runs and sum(decisions) > runs
