"""Which agents a successor of the launcher takes over, and which it lets go."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest

from ddlcore.contracts.launcher import AgentPlace
from ddlcore.control.server import Server
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.orphans import OrphanedAgents
from ddlcore.launch.agents.wire import (
    Adopt,
    Adopted,
    Ended,
    Quit,
    decode_to_agent,
    encode,
)
from ddlcore.launch.output.output import Output
from ddlcore.launch.output.screen import Screen
from ddlcore.messages.elastic import Opened
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_rank import Outgoing
from tests.control.echo import EchoCoordinator


def test_a_successor_takes_whoever_comes_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an agent whose host did not seem to answer, and one that comes again because it has not heard the answer."""
    pool = OrphanedAgents(
        [AgentPlace(index, f"h{index}", ()) for index in range(4)], lambda text: None, lambda *lost: []
    )
    server = Server(4, EchoCoordinator(), agents=pool)
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    begun = threading.Event()
    monkeypatch.setattr(server, "start", begun.set)
    screen = Screen(bytearray().extend)
    came: list[list[Agent]] = []
    thread = threading.Thread(target=lambda: came.append(pool.adopt(server, (1, 2), 40.0, Output((screen, screen), 4))))
    thread.start()
    try:
        assert begun.wait(40.0)
        for agent in (0, 1, 1, 2):
            pool.heard(agent, encode(Adopt(5, (((agent, 0), 7),), (), (), agent == 1)))
        thread.join(40.0)
        pool.heard(3, encode(Adopt(5, (), (), ())))
        pool.heard(2, encode(Adopt(5, (((2, 0), 7),), (), ())))
        assert [member.place.index for member in came[0]] == [0, 1, 2]
        assert [member.wants_to_leave for member in came[0]] == [False, True, False]
        assert [(agent, type(word)) for agent, word in told] == [
            *((agent, Adopted) for agent in (0, 1, 1, 2)),
            (3, Quit),
            (2, Adopted),
        ]
    finally:
        pool.close()
        server.close()


GIVEN_UP = Adopt(5, (((0, 0), 7), ((2, 0), 8)), (), ())
LATER = Adopt(5, (((0, 1), 7),), (), ())
# Rank 1 was started anew on its own host, which tells the end of its first process.
OTHER = Adopt(5, (((1, 1), 7),), (((1, 0), 9),), ())
NAMED = Adopt(5, (), (), (Opened((2, 0), ((0, 1), (1, 1)), (0, 1), (1, 2, 0), 5, (2, 0)),))
ENDED, SILENT = Ended(0, -9, "", 0), None


@pytest.mark.parametrize(
    "words",
    [
        [(0, GIVEN_UP), (1, LATER), (2, OTHER)],
        [(1, LATER), (0, GIVEN_UP), (2, OTHER)],
        [(2, OTHER), (1, LATER), (0, GIVEN_UP)],
        [(0, GIVEN_UP), (0, ENDED), (1, LATER), (2, OTHER)],
        [(0, GIVEN_UP), (0, SILENT), (1, LATER), (2, OTHER)],
        [(0, GIVEN_UP), (1, NAMED), (2, OTHER)],
        [(1, NAMED), (0, GIVEN_UP), (2, OTHER)],
    ],
    ids=["first", "second", "third", "has an end", "is silent", "a world first", "a world then"],
)
def test_a_successor_takes_no_agent_that_the_launcher_had_given_up(
    words: list[tuple[int, Adopt | Ended | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher started rank 0 again on another host, and was lost before the agent of rank 0's first process heard Quit.

    The two processes of rank 0 have one place, so what the first one says would be taken for words of the second. The
    second one's agent may not have come, but somebody may know of a world that names it.
    """
    said: list[str] = []
    lost: list[int] = []

    def lose(ranks: Collection[int], certain: bool) -> Outgoing[LaunchedRank]:
        lost.extend(ranks)
        return []

    pool = OrphanedAgents([AgentPlace(index, f"h{index}", ()) for index in range(3)], said.append, lose)
    server = Server(3, EchoCoordinator(), agents=pool)
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    given_up: list[int] = []
    monkeypatch.setattr(server, "give_up", given_up.append)
    monkeypatch.setattr(server, "do", lambda change: change())
    begun = threading.Event()
    monkeypatch.setattr(server, "start", begun.set)
    screen = Screen(bytearray().extend)
    came: list[list[Agent]] = []
    output = Output((screen, screen), 3)
    thread = threading.Thread(target=lambda: came.append(pool.adopt(server, (0, 1, 2), 40.0, output)))
    thread.start()
    try:
        assert begun.wait(40.0)
        for agent, word in words:
            if word is None:
                pool.silent(agent, 3.0)
            else:
                pool.heard(agent, encode(word))
        thread.join(40.0)
        assert [bool(member.gone) for member in pool.members] == [True, False, False]
        running = [process for one in came[0] if one.adopted is not None for process, _ in one.adopted.running]
        later = [(0, 1)] if (1, LATER) in words else []
        assert running == [*later, (1, 1)] and [watched.rank for watched in pool.ranks.all()] == [
            rank for rank, _ in running
        ]
        assert 0 in given_up and (0, Quit()) in told and any("h0 is given up" in text for text in said)
        assert set(lost) == ({0, 2} if words[0][0] == 0 else set()), "its ranks may have registered"
        assert pool.ranks._early == [], "no end is that of the process that runs at the place now"
    finally:
        pool.close()
        server.close()
