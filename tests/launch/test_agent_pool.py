"""What hosts must have in common, where the launcher listens, and how much may be under way."""

from __future__ import annotations

import platform
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from msgspec.structs import replace

from ddlcore.builtin.ssh import SshLauncher
from ddlcore.config.loading import Settings, load_settings
from ddlcore.contracts.interfaces import route_address
from ddlcore.contracts.launcher import AgentPlace, StartCommand
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.launch.agents.agent_pool import AgentPool
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.preflight import judge, show
from ddlcore.launch.agents.remote_plan import find_reach
from ddlcore.launch.agents.started import Started
from ddlcore.launch.agents.survey import survey, versions
from ddlcore.launch.agents.wire import (
    CHUNK_BYTES,
    Ack,
    Adopt,
    Begin,
    Begun,
    Credit,
    Data,
    Ended,
    Here,
    Leaves,
    Look,
    Quit,
    RankTask,
    Report,
    decode_from_agent,
    decode_to_agent,
    encode,
)
from ddlcore.launch.output.output import Output
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.supervisor import LOST, Supervisor
from ddlcore.messages.elastic import Opened
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.version import VERSION
from tests.control.echo import EchoCoordinator

PACKAGES = {"numpy": False, "pluggy": True, "no-such-package": True}
GOOD = Report("h", platform.python_version(), VERSION, versions(PACKAGES), "10.0.0.2", 4, (1, 2))


def settings(**given: str) -> Settings:
    return load_settings({}, flags=given)


# --- judging


def test_a_host_that_fits() -> None:
    """The same Python but for its last number, the same packages."""
    check = judge("h", replace(GOOD, python=f"{platform.python_version()}rc1"), "", PACKAGES)
    assert (check.problems, check.remarks) == ((), ())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"python": "2.7.18"}, f"Python 2.7.18 there, {platform.python_version()} here"),
        ({"ddl": "9.9"}, f"ddlcore 9.9 there, {VERSION} here"),
        ({"packages": {**GOOD.packages, "pluggy": "0.1"}}, "pluggy 0.1 there, "),
        ({"packages": {**GOOD.packages, "pluggy": ""}}, "pluggy not installed there, "),
        ({"packages": {**GOOD.packages, "no-such-package": "1"}}, "no-such-package 1 there, not installed here"),
        ({"problems": ("train.py: no such file",)}, "train.py: no such file"),
    ],
)
def test_a_host_that_does_not_fit(change: dict[str, Any], problem: str) -> None:
    """It is told in words what is different; nothing is started."""
    check = judge("h", replace(GOOD, **change), "", PACKAGES)
    assert len(check.problems) == 1
    assert check.problems[0].startswith(problem)


def test_another_framework_is_remarked() -> None:
    """It may work; the user is told."""
    check = judge("h", replace(GOOD, packages={**GOOD.packages, "numpy": "0.1"}), "", PACKAGES)
    assert check.problems == ()
    assert check.remarks[0].startswith("numpy 0.1 there, ")


def test_the_table_has_a_row_for_each_host() -> None:
    """Aligned; what else is wrong with a host stands below it; in colour on a terminal only."""
    checks = [
        judge("good", GOOD, "", PACKAGES),
        judge("bad", replace(GOOD, python="2.7.18", ddl="9.9"), "", PACKAGES),
        judge("gone", None, "gone: no such host", PACKAGES),
    ]
    lines = show(checks, on_terminal=False)
    assert [line.split()[0] for line in lines[:3]] == ["host", "good", "bad"]
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == ["ok", *checks[1].problems, "no such host"]
    column = lines[0].index("state")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    coloured = "\n".join(show(checks, on_terminal=True))
    assert "\x1b[32mok" in coloured and "no such host" in coloured


def test_a_survey_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing is told at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("")
    look = Look(str(tmp_path), ("there.py", "not.py"), "/no/program", ("numpy",), "", 3, 0)
    report = survey(look, "tcp://127.0.0.1:5")
    assert report.address == "127.0.0.1"
    assert len(set(report.ports)) == 3
    assert report.packages["numpy"]
    assert list(report.problems) == [f"not.py: no such file (looked in {tmp_path})", "/no/program: no such program"]
    nowhere = survey(Look("/no/where", ("x",), "sh", (), "eth77", 0, 0), "tcp://127.0.0.1:5")
    assert [problem.split(":")[0] for problem in nowhere.problems][:1] == ["/no/where, the directory of the job"]
    assert "no network interface is called eth77" in nowhere.problems[1]


def test_a_master_port_that_is_taken_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would listen there. The port is never among the free ports that a report lists, taken or not."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        look = Look(str(tmp_path), (), "sh", (), "", 3, port)
        report = survey(look, "tcp://127.0.0.1:5")
    assert list(report.problems) == [f"port {port} (MASTER_PORT) is taken; unset it and a free one is chosen"]
    assert len(report.ports) == 3 and port not in report.ports


# --- where the launcher listens


def test_the_route_decides_the_address() -> None:
    """One address for all; none at all where every agent is on this host."""
    reach = find_reach(settings(), {"a": "127.0.0.1", "b": "127.0.0.1"})
    assert (reach.bind, reach.own) == ("tcp://127.0.0.1:0", "127.0.0.1")
    assert reach.endpoint_of("tcp://127.0.0.1:77")("b") == "tcp://127.0.0.1:77"
    nobody = find_reach(settings(), {})
    assert (nobody.bind, nobody.own) == ("", "")
    assert nobody.endpoint_of("ipc://@x")("a") == "ipc://@x"


def test_hosts_on_different_networks_get_different_addresses() -> None:
    """The server then listens everywhere, with keys as ever."""
    reach = find_reach(settings(), {"a": "127.0.0.1", "b": "::1"})
    assert reach.bind == "tcp://[::]:0"
    assert reach.endpoint_of("tcp://[::]:77")("a") == "tcp://127.0.0.1:77"
    assert reach.endpoint_of("tcp://[::]:77")("b") == "tcp://[::1]:77"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "*", "[::]"])
def test_a_wildcard_is_translated(wildcard: str) -> None:
    """No host could connect to it."""
    reach = find_reach(settings(control_address=f"tcp://{wildcard}:4444"), {"a": "127.0.0.1"})
    assert reach.bind == f"tcp://{wildcard}:4444"
    assert reach.endpoint_of("tcp://0.0.0.0:4444")("a") == "tcp://127.0.0.1:4444"
    ours = reach.endpoint_of("tcp://0.0.0.0:4444")("this host, where one command starts agents on all")
    assert ours == "tcp://127.0.0.1:4444"


@pytest.mark.parametrize("address", ["ipc://@here", "node1:4444", "tcp://:4444"])
def test_other_hosts_need_an_address_of_tcp(address: str) -> None:
    """They would wait for nothing."""
    with pytest.raises(ValueError, match=r"^--control-address .* tcp://IP:PORT$"):
        find_reach(settings(control_address=address), {"a": "127.0.0.1"})


def test_an_address_or_interface_that_was_chosen() -> None:
    """It holds whatever the routes are."""
    assert find_reach(settings(control_address="tcp://10.9.8.7:5"), {"a": "127.0.0.1"}).own == "10.9.8.7"
    assert find_reach(settings(network_interface="lo"), {"a": "192.0.2.1"}).bind == "tcp://127.0.0.1:0"


def test_a_name_that_nobody_knows_has_the_address_of_the_others() -> None:
    """Its remote shell may know it; and if not, that is said for each host, beside what else is wrong."""
    reach = find_reach(settings(), {"nobody": "no-such-host.invalid", "a": "127.0.0.1"})
    assert reach.endpoint_of("tcp://0.0.0.0:7")("nobody").startswith("tcp://")
    assert reach.routes["a"] == route_address("127.0.0.1")


# --- the end of an agent's ranks


@pytest.fixture
def agents() -> Iterator[tuple[AgentPool, Server]]:
    """A pool of one agent, heard without a network."""
    made = AgentPool([AgentPlace(0, "h", (0, 1))], SshLauncher(), lambda text: None)
    server = Server(2, EchoCoordinator(), agents=made)
    made.call((), server, str, {}, 3.0, Look("/", (), "sh", (), "", 0, 0))
    yield made, server
    made.close()
    server.close()


def test_only_the_host_of_rank_0_is_asked_about_the_master_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody meets at this port on the other hosts, so it may be taken there."""
    pool = AgentPool([AgentPlace(0, "a", (1, 2)), AgentPlace(1, "b", (0, 3))], SshLauncher(), lambda text: None)
    server = Server(4, EchoCoordinator(), agents=pool)
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    look = Look("/", (), "sh", (), "", 0, 4711)
    try:
        pool.call((), server, str, {}, 3.0, look)
        for agent in (0, 1):
            pool.heard(agent, encode(Here(5)))
        assert told == [(0, replace(look, port=0)), (1, look)]
    finally:
        pool.close()
        server.close()


def test_a_large_result_is_waited_for(agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as more of it comes, however long all of it takes; and no longer."""
    monkeypatch.setattr("ddlcore.launch.agents.agent_pool._CLEARED_S", 0.05)
    asked = 0

    def come() -> bool:
        nonlocal asked
        asked += 1
        if asked < 20:
            agents[0].heard(0, encode(Data(0, "result", b"x")))
        return False

    monkeypatch.setattr("ddlcore.launch.agents.agent_pool._SLICE_S", 0.05)
    agents[0].finish(come)
    assert len(agents[0].ranks.results()[LaunchedRank(0)]) == 19


def test_ranks_that_could_not_be_started_have_ended(agents: tuple[AgentPool, Server]) -> None:
    """Whoever watches over them need not kill what is not there."""
    told: list[End] = []
    supervisor = Supervisor(agents[0].ranks.all(), grace_s=60.0, ended=told.append, say=lambda text: None)
    agents[0].ranks.attach(supervisor)
    agents[0].heard(0, encode(Begun((), "no memory")))
    supervisor.run()
    assert [(end.rank, end.lost) for end in told] == [(r, "it could not be started: no memory") for r in (0, 1)]


@pytest.mark.parametrize("begins_first", [True, False])
def test_an_agent_that_is_lost_after_it_began_has_lost_ranks(
    agents: tuple[AgentPool, Server], begins_first: bool
) -> None:
    """The launcher may see both at the same time: the job has begun, so it ends as one that has lost ranks."""
    pool, _ = agents
    if begins_first:
        pool.heard(0, encode(Begun((7, 8))))
    pool.silent(0, 3.0)
    problems = pool.begin([Begin((), {}, (), (), ())], 60.0, lambda: False)
    assert problems == ([] if begins_first else ["h: no message from it for 3 s"])
    told: list[End] = []
    supervisor = Supervisor(pool.ranks.all(), grace_s=60.0, ended=told.append, say=lambda text: None)
    pool.ranks.attach(supervisor)
    supervisor.run()
    assert [(end.rank, end.lost) for end in told] == [
        (rank, "its host h is gone (no message from it for 3 s)") for rank in (0, 1)
    ]


def test_an_agent_that_was_given_up_says_nothing_about_the_processes_that_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped for a while. It is told to end, kills its ranks, and tells so; but other hosts run them now."""
    pool = AgentPool([AgentPlace(0, "a", (0,)), AgentPlace(1, "b", (1,))], SshLauncher(), lambda text: None)
    server = Server(2, EchoCoordinator(), agents=pool)
    told: list[End] = []
    left: list[Agent] = []
    supervisor = Supervisor(pool.ranks.all(), grace_s=60.0, ended=told.append, say=lambda text: None)
    screen = Screen(bytearray().extend)
    try:
        pool.call((), server, str, {}, 3.0, Look("/", (), "sh", (), "", 0, 0))
        pool.leaves = left.append
        pool.ranks.attach(supervisor)
        pool.silent(1, 3.0)
        pool.streams.output = Output((screen, screen), 2)
        pool.ranks.again("a", 1, {})
        pool.heard(1, encode(Ended(1, -9)))
        pool.heard(1, encode(Leaves()))
        pool.heard(0, encode(Ended(1, 7)))
        ends = list(supervisor._remote_ends)
        assert [(rank, code, certain) for rank, code, _, certain in ends] == [(1, LOST, False), (1, 7, True)]
        assert left == []
    finally:
        pool.close()
        server.close()


def test_who_was_silent_for_too_long_is_told_to_end(
    agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may come back when its ranks were given up, and nobody would signal them any more."""
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(agents[1], "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    agents[0].silent(0, 3.0)
    assert agents[0].members[0].gone
    assert told == [(0, Quit())]


@pytest.mark.parametrize("task", ["stdin", "public"])
@pytest.mark.parametrize("code", [0, 255])
def test_the_end_of_a_command_is_that_of_its_agent_if_it_proves_it(
    code: int, task: Literal["stdin", "public"], agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of a remote shell that may end before its agent says nothing of an agent that is connected."""
    pool, server = agents
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    given_up: list[int] = []
    monkeypatch.setattr(server, "give_up", given_up.append)
    ends: list[tuple[int, bool]] = []
    supervisor = Supervisor(pool.ranks.all(), grace_s=60.0, ended=lambda end: None, say=lambda text: None)
    monkeypatch.setattr(supervisor, "ended_on_host", lambda rank, code, lost, certain: ends.append((rank, certain)))
    pool.ranks.attach(supervisor)
    pool.heard(0, encode(Here(5)))
    pool.heard(0, encode(Begun((1, 2))))
    told.clear()
    started = SimpleNamespace(command=StartCommand(("ssh", "h"), (0,), task=task), text="")
    pool._command_ended(cast(Started, started), code)
    if task == "public":
        assert (ends, told, given_up, pool.members[0].gone) == ([], [], [], "")
    else:
        assert ends == [(0, code == 0), (1, code == 0)]
        assert (told, given_up) == ([(0, Quit())], [0]), "it may live, and its ranks are not heard any more"


def test_ranks_of_an_agent_that_comes_too_late_are_not_heard(
    agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have been started in place of each, and would get the answer."""
    given_up: list[int] = []
    monkeypatch.setattr(agents[1], "give_up", given_up.append)
    agents[0].heard(0, encode(Adopt(5, (((0, 0), 7),), (), ())))
    assert given_up == [0]


def test_an_agent_that_was_given_up_before_it_came_is_told_to_end(
    agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was slow. Meanwhile another agent may have been called there."""
    pool, server = agents
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    changed: list[Agent] = []
    pool.changed = changed.append
    unheard: list[tuple[Sequence[int], bool]] = []
    monkeypatch.setattr(pool, "_unheard", lambda ranks, certain: unheard.append((ranks, certain)))
    monkeypatch.setattr(server, "do", lambda change: change())
    pool.lose("h", "it has not answered within 60 s")
    assert unheard == [((0, 1), False)]
    pool.lose("h", "a second time")
    for message in (Here(5), GOOD):
        pool.heard(0, encode(message))
    assert told == [(0, Quit())] * 3 and [member.gone for member in changed] == ["it has not answered within 60 s"]


def test_an_agent_that_is_called_late_knows_the_world(
    agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could not go on if the launcher were lost before its ranks are in a world."""
    pool, server = agents
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    world = Opened((1, 0), ((0, 0), (1, 0)), (0, 1), (0, 0), 5, (0, 0))
    pool.tell_of_world(world)
    pool.call_late(AgentPlace(1, "late", ()), StartCommand(("cat",), (1,)))
    pool.heard(1, encode(Here(5)))
    assert (1, world) in told


def test_the_end_of_a_process_is_not_taken_for_that_of_the_next_one(agents: tuple[AgentPool, Server]) -> None:
    """A successor learns of it twice: when the agent comes, and by the message that had waited for it."""
    pool, _ = agents
    supervisor = Supervisor(pool.ranks.all(), grace_s=60.0, ended=lambda end: None, say=lambda text: None)
    pool.ranks.attach(supervisor)
    screen = Screen(bytearray().extend)
    pool.streams.output = Output((screen, screen), 2)
    pool.ranks.again("h", 1, {}, start=1)
    pool.heard(0, encode(Ended(1, -9, start=0)))
    assert list(supervisor._remote_ends) == []
    pool.heard(0, encode(Ended(1, 3, start=1)))
    assert [(rank, code) for rank, code, _, _ in supervisor._remote_ends] == [(1, 3)]


def test_an_agent_that_is_called_late_gets_the_function_too(
    agents: tuple[AgentPool, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks call the same function as those that have begun with the job."""
    pool, server = agents
    told: list[tuple[int, object]] = []
    monkeypatch.setattr(server, "tell", lambda agent, data: told.append((agent, decode_to_agent(data))))
    pool.send_task(b"pickled")
    pool.call_late(AgentPlace(1, "late", ()), StartCommand(("cat",), (1,)))
    begin = Begin((), {}, (), (), (), stays=True)
    pool.begin_late(pool.members[1], begin)
    task = Data(-1, "task", b"pickled")
    assert told == [(0, task), (1, task), (1, begin)]


def test_parts_of_a_rank_that_has_moved_are_kept_apart(tmp_path: Path) -> None:
    """In an elastic job, processes of one rank run on several hosts, and each host numbers its parts of a timeline anew."""
    pool = AgentPool([AgentPlace(0, "a", (0, 1)), AgentPlace(1, "b", ())], SshLauncher(), lambda text: None)
    server = Server(2, EchoCoordinator(), agents=pool)
    try:
        pool.call((), server, str, {}, 3.0, Look("/", (), "sh", (), "", 0, 0))
        pool.streams.timeline_dir = tmp_path
        pool.streams.output = Output((Screen(bytearray().extend), Screen(bytearray().extend)), 2)
        pool.ranks.again("b", 1, {})
        for agent, rank, stream, data in (
            (0, 1, "timeline", b"a1,"), (1, 1, "timeline", b"b1,"), (0, 1, "timeline", b"a2,"),
            (1, 1, "timeline.1", b"b3"), (1, 1, "timeline", b"b2"), (1, 0, "timeline", b"of a rank that it never ran"),
        ):  # fmt: skip
            pool.heard(agent, encode(Data(rank, stream, data)))
    finally:
        pool.close()
        server.close()
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"rank1.json": b"a1,a2,", "rank1.1.json": b"b1,b2", "rank1.2.json": b"b3"}


# --- messages and credit


def test_records_come_back_as_they_were() -> None:
    """Both ways; what is none is one error of ours."""
    begin = Begin(("a",), {"X": "1"}, ("P_",), ("FD",), (RankTask(3, {"R": "3"}),), 3)
    assert decode_to_agent(encode(begin)) == begin
    assert decode_from_agent(encode(GOOD)) == GOOD
    for decode in (decode_to_agent, decode_from_agent):
        for data in (b"", b"\xc1", b"\x92\xa3abc\x01", encode(Data(0, "x", b""))[:-1]):
            with pytest.raises(DdlInternalError, match="cannot read"):
                decode(data)


def test_credit_bounds_what_is_under_way() -> None:
    """A sender waits until its pieces were used up, or nobody listens any more."""
    sent: list[Data] = []

    def note(data: bytes) -> None:
        message = decode_from_agent(data)
        assert isinstance(message, Data)
        sent.append(message)

    credit = Credit(note)
    results: list[bool] = []
    whole = bytes(3 << 20)
    sender = threading.Thread(target=lambda: results.append(credit.send(1, "stdout", whole)), daemon=True)
    sender.start()
    given = 0
    while given < len(whole):
        under_way = sum(len(piece.data) for piece in list(sent)) - given
        assert under_way <= 1 << 20
        if under_way:
            credit.give(under_way)
            given += under_way
    sender.join(40)
    assert results == [True]
    assert b"".join(piece.data for piece in sent) == whole
    assert max(len(piece.data) for piece in sent) == CHUNK_BYTES
    held = threading.Thread(target=lambda: results.append(credit.send(1, "stdout", whole)), daemon=True)
    held.start()
    credit.close()
    held.join(40)
    assert results == [True, False]


def test_an_empty_piece_is_an_end() -> None:
    """It costs no credit."""
    sent: list[bytes] = []
    assert Credit(sent.append).send(2, "stdin", b"")
    assert [decode_to_agent(data) for data in sent] == [Data(2, "stdin", b"")]
    assert decode_to_agent(encode(Ack(5))) == Ack(5)
