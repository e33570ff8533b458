"""Which agents go on when their launcher is lost, and where they go."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from ddlcore.control.credentials import Access
from ddlcore.launch.agents import succession
from ddlcore.launch.agents.succession import Succession, probe_all
from ddlcore.launch.agents.wire import Handover, Heir
from ddlcore.messages.elastic import Opened, Process
from ddlcore.messages.ranks import FIRST_START, LaunchedRank

PATIENCE_S = 40.0


class Port:
    """A port of this machine that accepts connections, as that of an heir does; or one that does not any more."""

    def __init__(self, open_: bool = True) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.socket.getsockname()[1]}"
        if not open_:
            self.socket.close()


@pytest.fixture
def ports() -> Iterator[list[Port]]:
    made = [Port(), Port(), Port(False)]
    yield made
    for port in made:
        port.socket.close()


def heir(agent: int, endpoint: str) -> Heir:
    return Heir(agent, f"host{agent + 1}", endpoint, "s" * 40, (), "127.0.0.1", 1)


def handover(*heirs: Heir) -> Handover:
    hosts = tuple((f"host{number}", 1) for number in range(4))
    return Handover(heirs, "c" * 40, "k" * 40, {}, hosts, 4, 4, "ssh", ("127.0.0.1", 1), "/nowhere")


def opened(generation: int = 1, effective: int = 0) -> Opened:
    processes: tuple[Process, ...] = tuple((LaunchedRank(rank), FIRST_START) for rank in range(4))
    return Opened((generation, 0), processes, (0, 1, 2, 3), (0, 1, 2, 3), 5, (effective, 0))


def prepared(agent: int, *heirs: Heir) -> Succession:
    one = Succession(agent)
    one.take(handover(*heirs))
    one.hears_of(opened())
    return one


def test_who_accepts_connections(ports: list[Port]) -> None:
    """A host that refuses a connection lives, too."""
    answers = {ports[0].endpoint: True, ports[1].endpoint: True, ports[2].endpoint: False}
    assert probe_all([port.endpoint for port in ports]) == answers
    assert probe_all(["tcp://nowhere", ports[1].endpoint]) == {ports[1].endpoint: True}


def test_an_agent_that_was_told_too_little_cannot_go_on() -> None:
    one = Succession(0)
    assert not one.is_prepared
    one.hears_of(opened())
    assert not one.is_prepared
    one.take(handover())
    assert not one.is_prepared, "there is no heir"
    one.take(handover(heir(1, "")))
    assert not one.is_prepared, "no successor can be started there"
    one.take(handover(heir(1, "tcp://127.0.0.1:1")))
    assert one.is_prepared


def test_older_worlds_are_forgotten() -> None:
    """Only worlds that may live count when the launcher is lost."""
    one = Succession(0)
    for generation in (1, 2, 3):
        one.hears_of(opened(generation))
    assert len(one.worlds) == 3
    one.hears_of(opened(4, 3))
    assert [world.ballot for world in one.worlds] == [(3, 0), (4, 0)]


def test_an_agent_goes_to_the_first_heir_that_answers(ports: list[Port]) -> None:
    """The first one is lost with the launcher."""
    first, second, third = heir(0, ports[2].endpoint), heir(1, ports[0].endpoint), heir(2, ports[1].endpoint)
    one = prepared(2, first, second, third)
    joined: queue.SimpleQueue[Access] = queue.SimpleQueue()

    def join(access: Access) -> None:
        joined.put(access)
        one.adopted()

    # Hosts 2 and 3 answer: with host 1 silent and host 0 lost, they would be half without the first.
    one.hears_of(Opened((2, 0), ((0, 0), (2, 0), (3, 0)), (0, 2, 3), (0, 1, 2, 3), 5, (2, 0)))
    assert one.go_on("it is gone", ports[2].endpoint, join, lambda: [(3, 0)]) == ""
    access = joined.get()
    assert (access.endpoint, access.client_secret) == (second.endpoint, "k" * 40) and joined.empty()


def test_an_agent_that_alone_was_cut_off_ends(ports: list[Port]) -> None:
    """The launcher still answers, so the others go on with it."""
    one = prepared(1, heir(1, ports[0].endpoint))
    why = one.go_on("silence", ports[1].endpoint, _never, lambda: [(2, 0)])
    assert why == "the launcher lives, but has given up the connection to this host"


def test_a_part_without_a_quorum_ends_at_once(ports: list[Port]) -> None:
    nowhere = "tcp://nowhere:1"
    one = prepared(1, heir(0, nowhere), heir(1, ports[0].endpoint), heir(2, nowhere))
    why = one.go_on("silence", nowhere, _never, lambda: [(2, 0)])
    assert "only 1 of 4 ranks of world 1" in why


def test_an_agent_that_is_not_the_heir_leaves_it_to_the_heir(ports: list[Port]) -> None:
    """The agent of the lost third host has told the heir that its rank is dead, so two of three are here, not two of four."""
    nowhere = "tcp://nowhere:1"
    one = prepared(1, heir(0, ports[0].endpoint), heir(1, ports[1].endpoint), heir(2, nowhere))
    joined: list[str] = []

    def join(access: Access) -> None:
        joined.append(access.endpoint)
        one.adopted()

    assert one.go_on("silence", nowhere, join, lambda: [(2, 0)]) == ""
    assert joined == [ports[0].endpoint]


def test_an_agent_whose_heir_has_ended_looks_by_itself(ports: list[Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heir has found that this part has no quorum. The agent finds the same, and starts no successor."""
    monkeypatch.setattr(succession, "LOOK_S", 0.05)
    nowhere = "tcp://nowhere:1"
    one = prepared(1, heir(0, ports[0].endpoint), heir(1, ports[1].endpoint), heir(2, nowhere))
    why = one.go_on("silence", nowhere, lambda _: ports[0].socket.close(), lambda: [(2, 0)])
    assert "only 2 of 4 ranks of world 1" in why


def test_an_heir_that_refuses_is_not_waited_for(ports: list[Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found no quorum, and has ended. A part of many hosts would end one host after the other."""
    monkeypatch.setattr(succession, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(succession, "LOOK_S", 1000.0)
    nowhere = "tcp://nowhere:1"
    one = prepared(1, heir(0, ports[0].endpoint), heir(1, ports[1].endpoint), heir(2, nowhere))
    why = one.go_on("silence", nowhere, lambda _: ports[0].socket.close(), lambda: [(2, 0)])
    assert "only 2 of 4 ranks of world 1" in why


def test_a_wait_for_an_heir_can_be_given_up(ports: list[Port]) -> None:
    heirs = [heir(agent, ports[0].endpoint) for agent in (0, 1, 2)]
    one = prepared(2, *heirs)
    asked = threading.Event()
    ends: list[str] = []
    join = lambda access: asked.set()  # noqa: E731
    thread = threading.Thread(target=lambda: ends.append(one.go_on("silence", ports[2].endpoint, join, list)))
    thread.start()
    assert asked.wait(PATIENCE_S)
    asked.clear()
    one.give_up()
    thread.join(PATIENCE_S)
    assert ends == ["no successor of the launcher has answered"]
    assert not asked.is_set(), "it goes to no other heir"


def test_an_agent_goes_to_the_next_heir_when_the_first_one_is_lost(
    ports: list[Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host still answered when the launcher was lost."""
    monkeypatch.setattr(succession, "LOOK_S", 0.05)
    one = prepared(3, *(heir(agent, ports[agent].endpoint) for agent in (0, 1)), heir(2, ""))
    one.hears_of(Opened((2, 0), ((1, 0), (2, 0), (3, 0)), (1, 2, 3), (0, 1, 2, 3), 5, (2, 0)))
    joined: list[str] = []

    def join(access: Access) -> None:
        joined.append(access.endpoint)
        if len(joined) == 1:
            ports[0].socket.close()
        else:
            one.adopted()

    assert one.go_on("silence", ports[2].endpoint, join, lambda: [(3, 0)]) == ""
    assert joined == [ports[0].endpoint, ports[1].endpoint]


def test_an_agent_goes_to_the_next_heir_when_its_own_successor_has_failed(
    ports: list[Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notices the end of the process at once."""
    monkeypatch.setattr(succession, "_PROGRAM", "sys.exit(3)")
    one = Succession(0)
    endpoint, _ = one.open("127.0.0.1")
    one.take(handover(heir(0, endpoint), heir(1, ports[1].endpoint), heir(2, "")))
    one.hears_of(opened())
    joined: list[str] = []

    def join(access: Access) -> None:
        joined.append(access.endpoint)
        if access.endpoint == ports[1].endpoint:
            one.adopted()

    try:
        assert one.go_on("silence", ports[2].endpoint, join, lambda: [(0, 0)]) == ""
        assert joined == [endpoint, ports[1].endpoint]
    finally:
        one.close()


def test_a_host_that_refuses_a_connection_may_still_have_its_ranks(
    ports: list[Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor has just died, and its agent will come: without it, this part would be one of three ranks."""
    one = Succession(1)
    endpoint, _ = one.open("127.0.0.1")
    one.take(handover(heir(0, ports[2].endpoint), heir(1, endpoint), heir(2, "tcp://nowhere:1")))
    one.hears_of(Opened((2, 0), ((1, 0), (2, 0), (3, 0)), (1, 2, 3), (0, 1, 2, 3), 5, (2, 0)))
    expected: list[set[int]] = []
    monkeypatch.setattr(
        one, "_start", lambda _handover, heirs, _reason: expected.append({heir.agent for heir in heirs})
    )
    try:
        why = one.go_on("silence", "tcp://nowhere:1", lambda access: one.adopted(), lambda: [(2, 0)])
    finally:
        one.close()
    assert (why, expected) == ("", [{0, 1}])


def test_an_agent_whose_job_has_ended_while_it_was_cut_off_ends_at_once(ports: list[Port]) -> None:
    """The hosts of the launcher and of the other agents live, but nobody listens there any more."""
    one = prepared(1, heir(0, ports[2].endpoint), heir(1, ports[0].endpoint), heir(2, ports[2].endpoint))
    why = one.go_on("silence", ports[2].endpoint, _never, lambda: [(2, 0)])
    assert "only 1 of 4 ranks of world 1" in why


def test_an_answer_that_comes_late_counts(ports: list[Port], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the agent would turn to another heir, which never starts a successor, because it has been adopted, too."""
    one = prepared(3, heir(0, ports[0].endpoint), heir(1, ports[1].endpoint), heir(2, ""))
    joined: list[str] = []

    def await_in_vain(*_: object) -> object:
        one.adopted()  # just after the agent has given up
        return succession._Answer.GONE

    monkeypatch.setattr(one, "_await", await_in_vain)
    assert one.go_on("silence", ports[2].endpoint, lambda access: joined.append(access.endpoint), list) == ""
    assert joined == [ports[0].endpoint]


def test_a_second_succession_ends_the_first(ports: list[Port]) -> None:
    """The successor was lost before the first call of ``go_on`` had read its answer."""
    one = prepared(3, heir(0, ports[0].endpoint), heir(1, ports[1].endpoint), heir(2, ""))
    asked = threading.Event()
    ends: list[str] = []
    begin = lambda: ends.append(one.go_on("silence", ports[2].endpoint, lambda _: asked.set(), list))  # noqa: E731
    first = threading.Thread(target=begin)
    first.start()
    assert asked.wait(PATIENCE_S)
    asked.clear()
    second = threading.Thread(target=begin)
    second.start()
    assert asked.wait(PATIENCE_S)
    one.adopted()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert ends == ["", ""]


def test_a_host_without_an_address_has_no_successor() -> None:
    one = Succession(0)
    assert one.open("") == ("", "") and one.open("192.0.2.1") == ("", "")
    endpoint, key = one.open("127.0.0.1")
    assert endpoint.startswith("tcp://127.0.0.1:") and len(key) == 40
    assert probe_all([endpoint]) == {endpoint: True}
    one.close()
    assert probe_all([endpoint]) == {endpoint: False}


def _never(access: Access) -> None:
    raise AssertionError(f"nobody is to be asked, {access!r} was")
