"""Follows a run of the model of successions with the code that decides: ElasticMembership, Quorum, and Succession of an agent.

When a coordinator or an agent of the model learns something, the code is told the same. The code must then decide as the
model may decide at that moment, and both must know of the same worlds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ddlcore.coordinator.membership import Coordinating, ElasticMembership, MemberPatience
from ddlcore.coordinator.quorum import Quorum
from ddlcore.launch.agents.succession import Succession as AgentsMemory
from ddlcore.messages.elastic import Dismissed, NextWorld, Opened, Register
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_rank import Outgoing
from tests.models.succession_coordinators import SuccessionMove
from tests.models.succession_model import Succession
from tests.models.succession_state import FIRST_WORLD, GATHERS, LAUNCHER, NOBODY, SERVES, Config, Coordinator, State

_DECISION = re.compile(r"\d+ (opens|dismisses|ends the job)")
_PATIENCE = MemberPatience(10.0)


class Follower:
    """One run of the model of ``config``, and the same run of the code."""

    def __init__(self, config: Config) -> None:
        self._model = Succession(config)
        self._places = len(config.hosts)
        self.state = self._model.start()
        launcher = ElasticMembership(
            config.hosts, 1, self._places, _PATIENCE, 0, Quorum(), Coordinating(LAUNCHER, LAUNCHER)
        )
        for place in range(self._places):
            launcher.register(place, Register(PROTOCOL, "", 0, 0, "", 0))
        launcher.began(FIRST_WORLD[0])
        self._memberships = {LAUNCHER: launcher}
        self._news = {LAUNCHER: [_announced(launcher)]}  # by coordinator: all that it has told its agents
        self._told: dict[int, list[Opened]] = {}  # by successor: what agents have told it
        self._agents = [AgentsMemory(host) for host in range(len(self.state.agents))]
        for agent in self._agents:
            agent.hears_of(_announced(launcher))
        self._steps = dict.fromkeys(range(self._places), 0)  # by process of the model
        self.decisions = 0
        self.names: list[str] = []  # of the moves so far

    def run(self, chance: random.Random, fault_share: float) -> None:
        """Go on with random moves to the end of the run. Raises AssertionError where model and code differ."""
        while moves := self._moves():
            faults, usual = [one for one in moves if one.is_fault], [one for one in moves if not one.is_fault]
            among = faults if faults and (not usual or chance.random() < fault_share) else usual
            self._go(chance.choice(among))

    def _moves(self) -> list[SuccessionMove]:
        return list(self._model.moves(self.state))

    def _go(self, move: SuccessionMove) -> None:
        """Do ``move`` in the model and in the code, and then what the code decides."""
        before, self.state = self.state, move.after
        self.names.append(move.name)
        number, outgoing = self._tell_code(move.name, before)
        self._tell_agents(before)
        if number != NOBODY:
            self._decide(number, outgoing)
        self._compare()

    def _tell_code(self, name: str, before: State) -> tuple[int, Outgoing[LaunchedRank]]:
        """Tell the code what happens in the move ``name``. Return which coordinator learns it, and what that one sends."""
        numbers = [int(one) for one in re.findall(r"\d+", name)]
        if name.startswith("all in"):
            members = dict(self.state.worlds)[self.state.chain[-1]].members
            self._steps.update(dict.fromkeys(members, 1 + max(self._steps[i] for i in members)))
        elif " and starts " in name:
            number, where = numbers[-1], Coordinating(numbers[-1], numbers[0])
            self._memberships[number] = ElasticMembership(
                (-1,) * self._places, 1, self._places, _PATIENCE, 0, Quorum(), where
            )
            self._news[number] = []
        elif " comes to " in name:
            self._told.setdefault(numbers[1], []).extend(self._agents[numbers[0]].worlds)
            aside = set(_of(before, numbers[1]).running) - set(_of(self.state, numbers[1]).running)
            self._memberships[numbers[1]].unheard([LaunchedRank(before.processes[i].place) for i in aside], False)
        elif " registers at " in name:
            return numbers[1], self._register(numbers[0], numbers[1])
        elif name[0].isdecimal() and not _DECISION.match(name):
            return numbers[0], self._tell_coordinator(name, numbers, before)
        return NOBODY, []

    def _tell_coordinator(self, name: str, numbers: list[int], before: State) -> Outgoing[LaunchedRank]:
        """Tell a coordinator, whose number comes first in ``numbers``, what happens to it in the move ``name``."""
        number, membership = numbers[0], self._memberships.get(numbers[0])
        if membership is None or self.state.coordinators[number] is None:
            return []
        if " has gathered " in name:
            one = _of(self.state, number)
            running = {self.state.processes[i].name: self.state.processes[i].host for i in one.running}
            return membership.adopt(self._told[number], running, one.dead)
        if " wants " in name:
            return membership.dismiss([before.processes[numbers[1]].place], "asked")
        if " starts " in name:
            self._steps[numbers[1]] = -1
            membership.started(numbers[2], numbers[3])
        elif " sees that " in name:
            membership.began(numbers[1])
            self._news[number].append(_announced(membership))
        elif (" learns that " in name or " gives up " in name) and _of(self.state, number).phase == SERVES:
            lost = set(_of(before, number).running) - set(_of(self.state, number).running)
            is_certain = " learns that " in name
            places = [before.processes[i].place for i in lost]
            if not is_certain:
                membership.unheard(places, False)
            return [one for place in places for one in membership.ended(place, "gone", is_certain)]
        return []

    def _register(self, i: int, number: int) -> Outgoing[LaunchedRank]:
        one, coordinator = self.state.processes[i], _of(self.state, number)
        if coordinator.phase == SERVES and i not in coordinator.running:
            return []  # nobody listens to a process that was given up
        message = Register(PROTOCOL, "", one.world[0], self._steps[i], "", 0, one.taken)
        return self._memberships[number].register(one.place, message)

    def _decide(self, number: int, outgoing: Outgoing[LaunchedRank]) -> None:
        """Compare what coordinator ``number`` of the code sends with the decision of the model, and do that."""
        decisions = [one for one in self._moves() if _DECISION.match(one.name)]
        membership = self._memberships.get(number)
        worlds = [message for _, message in outgoing if isinstance(message, NextWorld)]
        dismissed = {place for place, message in outgoing if isinstance(message, Dismissed)}
        if membership is None or not (worlds or dismissed or membership.over):
            assert not decisions, f"the code waits, and the model: {decisions[0].name}"
            return
        if not decisions:
            assert self._moves() == [], f"the model waits, and the code sends {outgoing} {membership.over}"
            return
        before, (move,) = self.state, decisions
        self.state = move.after
        self.names.append(move.name)
        self.decisions += 1
        members: tuple[int, ...] = ()
        if worlds:
            ballot = _of(self.state, number).newest
            assert ballot == worlds[0].ballot, f"the code opens {worlds[0].ballot}"
            members = dict(self.state.worlds)[ballot].members
            names = tuple(self.state.processes[i].name for i in members)
            assert names == _announced(membership).processes, f"the code opens a world with {names}"
            self._news[number].append(_announced(membership))
        elif dismissed:
            assert "dismisses" in move.name, f"the code dismisses {dismissed}"
            members = _of(self.state, number).waiting
        else:
            assert "ends the job" in move.name, f"the code ends the job: {membership.over}"
        if members:
            rest = set(_of(before, number).waiting) - set(members)
            assert {self.state.processes[i].place for i in rest} == dismissed, f"the code dismisses {dismissed}"
        self._tell_agents(before)

    def _tell_agents(self, before: State) -> None:
        """Tell the agents of the code the news that the agents of the model have heard in the last move."""
        for host, (old, new) in enumerate(zip(before.agents, self.state.agents)):
            if new.is_there and new.boss == old.boss:
                for news in self._news.get(new.boss, [])[old.heard : new.heard]:
                    self._agents[host].hears_of(news)

    def _compare(self) -> None:
        """Compare what the agents and the coordinators of the code know of worlds with what those of the model know."""
        for host, agent in enumerate(self.state.agents):
            if agent.is_there:
                known = tuple(sorted(one.ballot for one in self._agents[host].worlds))
                assert known == agent.knows.worlds, f"agent {host} of the code knows of {known}"
        for number, one in enumerate(self.state.coordinators):
            if one is not None and one.phase not in (SERVES, GATHERS):
                self._memberships.pop(number, None)
            if one is not None and one.phase == SERVES:
                told = _announced(self._memberships[number])
                facts = told.ballot, told.effective, max(told.taken, FIRST_WORLD)
                assert facts == (one.newest, one.knows.begun, one.knows.taken), f"coordinator {number} knows {facts}"


def _of(state: State, number: int) -> Coordinator:
    one = state.coordinators[number]
    assert one is not None
    return one


def _announced(membership: ElasticMembership) -> Opened:
    world = membership.opened()
    assert world is not None
    return world


def followed(config: Config, runs: int, seed: int) -> Sequence[int]:
    """Follow ``runs`` random runs of ``config``, and return how many decisions there were in each."""
    chance = random.Random(seed)
    counts = []
    for _ in range(runs):
        one = Follower(config)
        try:
            one.run(chance, chance.choice((0.01, 0.03, 0.1, 0.3)))
        except AssertionError as differ:
            raise AssertionError("\n  ".join([str(differ), *one.names])) from differ
        counts.append(one.decisions)
    return counts
