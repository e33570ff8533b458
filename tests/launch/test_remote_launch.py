"""What agents are told: where the ranks meet, what a host that is called late needs, and whether a successor may follow."""

from __future__ import annotations

import platform
import queue
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddlcore.config.loading import Settings, load_settings
from ddlcore.contracts.launcher import AgentPlace, Launcher, StartCommand, StartPlan
from ddlcore.control.server import Server
from ddlcore.hooks import LauncherProvider
from ddlcore.launch.agents import remote_launch
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.preflight import compared_packages
from ddlcore.launch.agents.remote_launch import RemoteLaunch, goes_on_without_launcher
from ddlcore.launch.agents.remote_plan import Reach, RemotePlan, route_for
from ddlcore.launch.agents.survey import versions
from ddlcore.launch.agents.wire import (
    CHUNK_BYTES,
    Begin,
    Begun,
    Data,
    Here,
    Look,
    Quit,
    Report,
    decode_to_agent,
    encode,
)
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.version import VERSION
from tests.control.echo import EchoCoordinator

PATIENCE_S = 40.0
ADDRESS = "tcp://127.0.0.1:4444"
PROVIDER = LauncherProvider("stand-in", "nowhere:StandIn")
REGISTRY = Registry()
LOOK = Look("/", (), "sh", (), "", 2, 0)


def report(address: str, ports: tuple[int, ...] = (7, 8)) -> Report:
    packages = versions(compared_packages(REGISTRY))
    return Report("h", platform.python_version(), VERSION, packages, address, 4, ports)


class StandIn(Launcher):
    """Starts no agent: its command reads what an agent would read, and ends with its standard input."""

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        return [StartCommand(("cat",), (place.index,), own=("NODE_",)) for place in plan.agents]


def plan(layout: Layout, settings: Settings) -> RemotePlan:
    return RemotePlan.plan(layout, (PROVIDER, StandIn), settings, {"PATH": "/usr/bin:/bin"}, "/", more=True)


@pytest.mark.parametrize("here", [-1, 1])
@pytest.mark.parametrize("wanted", [0, 29500])
def test_the_ranks_meet_on_the_host_of_rank_0(here: int, wanted: int) -> None:
    """MASTER_ADDR and MASTER_PORT are of that host, also where the launcher runs elsewhere, and for processes that come later."""
    settings = load_settings({}, flags={"control_address": ADDRESS, "min_np": "1"})
    launch = RemoteLaunch(
        plan(Layout(("h1", "h2"), (0, 1, 1), here), settings), registry=REGISTRY, say=lambda text: None
    )
    addresses = {"h1": "10.0.0.1", "h2": "10.0.0.2"}
    for member in launch.agents.members:
        last = int(addresses[member.place.host][-1])
        member.report = report(addresses[member.place.host], tuple(range(1000 * last, 1000 * last + 4)))
    environments = launch.environments("/job", wanted)
    meets = {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environments}
    assert meets == {("10.0.0.1", str(wanted or 1003))}
    addresses["h2"] = "10.0.0.2" if here < 0 else "127.0.0.1"
    assert [e["DDL_ADDRESS"] for e in environments] == ["10.0.0.1", addresses["h2"], addresses["h2"]]
    late = launch.own_variables(1, "h1", (0, 0, 1))
    assert {(late["MASTER_ADDR"], late["MASTER_PORT"])} == meets
    assert (late["DDL_ADDRESS"], late["RANK"], late["LOCAL_RANK"]) == ("10.0.0.1", "1", "1")


@pytest.mark.parametrize(
    ("flags", "command", "goes_on"),
    [
        ({"min_np": "1"}, ("train",), True),
        ({"min_np": "1", "launcher_loss": "continue"}, ("train",), True),
        ({"min_np": "1", "launcher_loss": "end"}, ("train",), False),
        ({"min_np": "1"}, (), False),
        ({}, ("train",), False),
    ],
    ids=["elastic", "continue", "end", "a function", "not elastic"],
)
def test_which_jobs_go_on_without_their_launcher(
    flags: Mapping[str, str], command: Sequence[str], goes_on: bool
) -> None:
    """Without a successor, all ranks must end with the launcher: nobody would notice them any more."""
    assert goes_on_without_launcher(load_settings({}, flags=flags), command) == goes_on


@pytest.mark.parametrize("rank_0_on", [0, 1])
def test_the_host_of_rank_0_gets_the_standard_input(rank_0_on: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, and then its end; the agents of the other hosts get none."""
    settings = load_settings({}, flags={"control_address": ADDRESS})
    launch = RemoteLaunch(
        plan(Layout(("h1", "h2"), (rank_0_on, 1 - rank_0_on), -1), settings), registry=REGISTRY, say=lambda text: None
    )
    server = Server(2, EchoCoordinator(), agents=launch.agents)
    pieces = [b"a" * CHUNK_BYTES, b"b" * 10, b""]
    begins: dict[int, Begin] = {}
    streams: queue.SimpleQueue[tuple[int, Data]] = queue.SimpleQueue()

    def tell(agent: int, data: bytes) -> None:
        message = decode_to_agent(data)
        if isinstance(message, Begin):
            begins[agent] = message
            launch.agents.heard(agent, encode(Begun((5,))))
        elif isinstance(message, Data):
            streams.put((agent, message))

    monkeypatch.setattr(server, "tell", tell)
    monkeypatch.setattr(remote_launch, "os", SimpleNamespace(read=lambda fd, nbytes: pieces.pop(0)))
    launch.agents.call((), server, str, {}, 3.0, LOOK)
    try:
        for member in launch.agents.members:
            member.report = report("10.0.0.1")
        launch.environments("", 29500)
        assert launch.begin(("cat",), {}, settings, lambda: False, gives_input=True) == []
        assert {agent: begin.stdin_rank for agent, begin in begins.items()} == {rank_0_on: 0, 1 - rank_0_on: -1}
        told = [streams.get(timeout=PATIENCE_S) for _ in range(3)]
    finally:
        launch.agents.close()
        server.close()
    text = [b"a" * CHUNK_BYTES, b"b" * 10, b""]
    assert told == [(rank_0_on, Data(0, "stdin", piece)) for piece in text] and streams.empty()


# --- an agent that is called while ranks run


class Late:
    """A job whose only rank runs on this host, and which calls h2 while this rank runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **flags: str) -> None:
        settings = load_settings({}, flags={"control_address": ADDRESS, "min_np": "1", **flags})
        self.launch = RemoteLaunch(plan(Layout(("h1",), (0,), 0), settings), registry=REGISTRY, say=lambda text: None)
        self.server = Server(4, EchoCoordinator(), agents=self.launch.agents)
        self.told: list[tuple[int, object]] = []
        monkeypatch.setattr(self.server, "tell", lambda agent, data: self.told.append((agent, decode_to_agent(data))))
        self.reported: list[Agent] = []
        self.launch.agents.changed = self.reported.append
        self.launch.prepare(self.server, LOOK, lambda: False, lambda line: None)
        self.launch.environments("/job", 29500)
        environ = {"COLOUR": "red", "DDL_JOB_FILE": "/of/this/host"}
        assert self.launch.begin(("python", "train.py"), environ, settings, lambda: False) == []
        self.launch.call_late("h2")
        self.launch.agents.heard(0, encode(Here(5)))

    def report(self, what: Report) -> Agent:
        self.launch.agents.heard(0, encode(what))
        (member,) = self.reported
        return member

    def close(self) -> None:
        self.launch.agents.close()
        self.server.close()


@pytest.fixture(params=["continue", "end"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    made = Late(monkeypatch, launcher_loss=request.param)
    yield made
    made.close()


def test_a_host_that_is_called_late_is_told_all_that_it_needs(late: Late) -> None:
    """It begins without ranks, and waits for Again. It opens a port for a successor unless the job ends with its launcher."""
    member = late.report(report("10.0.0.2"))
    assert member.place == AgentPlace(0, "h2", ())
    assert late.launch.take_in(member, slots=2) == ()
    (_, look), (agent, begin) = late.told
    assert (look, agent) == (LOOK, 0) and isinstance(begin, Begin)
    assert (begin.command, begin.ranks, begin.stays) == (("python", "train.py"), (), True)
    assert begin.own == ("NODE_",)
    assert begin.succession == (late.launch.remote_plan.settings.text("launcher_loss") == "continue")
    assert begin.environ["COLOUR"] == "red" and begin.environ["OMP_NUM_THREADS"] == "2"
    assert "DDL_JOB_FILE" not in begin.environ
    assert late.launch.own_variables(1, "h2", (0, 1))["DDL_ADDRESS"] == "10.0.0.2"


def test_a_host_that_does_not_fit_is_sent_home(late: Late) -> None:
    """It would start ranks that cannot take part."""
    member = late.report(replace(report("10.0.0.2"), python="2.7.18"))
    (problem,) = late.launch.take_in(member, slots=2)
    assert problem.startswith("Python 2.7.18 there")
    assert late.told[1:] == [(0, Quit())] and member.over


def test_hosts_that_are_called_late_find_the_launcher() -> None:
    """They connect to the address that the user has chosen or, if that is all addresses, to the one on their route."""
    for address, endpoint in ((ADDRESS, ADDRESS), ("tcp://0.0.0.0:4444", "tcp://127.0.0.1:4444")):
        reach = Reach(address, {})
        settings = load_settings({}, flags={"control_address": address})
        reach.routes["h2"] = route_for(settings, reach, "127.0.0.1")
        assert reach.endpoint_of(address)("h2") == endpoint


def test_what_only_the_launching_host_uses_may_be_missing_elsewhere() -> None:
    """A difference stops a job only for plugins that ranks use."""
    packages = compared_packages(settings_of({}, warns=False)[1])
    stops = {name: packages[name] for name in ("ddl-dashboard", "ddl-conform", "ddl-doctor", "ddl-shm", "torch")}
    assert stops == {
        "ddl-dashboard": False, "ddl-conform": False, "ddl-doctor": True, "ddl-shm": True, "torch": False,
    }  # fmt: skip
