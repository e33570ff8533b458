"""What the host table of an elastic job decides is carried out: agents are called, ranks are started and dismissed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from ddlcore.builtin.ssh import SshLauncher
from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.contracts.launcher import AgentPlace, HostSlots
from ddlcore.control.server import Server
from ddlcore.launch.agents.agent_pool import AgentPool
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.wire import Again, Credit, Leaves, Look, Quit, RankTask, decode_to_agent, encode
from ddlcore.launch.job import growth as growth_module
from ddlcore.launch.job.growth import Growth
from ddlcore.launch.job.host_table import HostTable
from ddlcore.launch.output.output import Output
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.revival import Revival
from ddlcore.launch.ranks.supervisor import LOST, Supervisor, Watched
from ddlcore.messages.ranks import LaunchedRank
from tests.control.echo import EchoCoordinator

PATIENCE_S = 40.0
COOLDOWN_S = (10.0, 30.0)
CREDIT = Credit(lambda data: None)  # of agents to which nothing is sent


def slots(**hosts: int) -> list[HostSlots]:
    return [HostSlots(name, count) for name, count in hosts.items()]


class Clock:
    """The time, which passes only if a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Supervising:
    """A supervisor that runs no ranks: it calls each task at once, and writes down which ranks it must start."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def do(self, task: Callable[[], None]) -> None:
        task()

    def start(self, rank: int) -> None:
        self.started.append(rank)


@dataclass
class Remote:
    """A remote launch that starts no agents. An agent has reported when the test calls ``answer``."""

    agents: AgentPool
    called: list[str] = field(default_factory=list)
    taken: list[tuple[str, int]] = field(default_factory=list)  # host and slots
    unreachable: str = ""
    problems: tuple[str, ...] = ()
    calls_hosts: bool = True

    def own_variables(self, rank: int, host: str, hosts: Sequence[int]) -> dict[str, str]:
        return {"RANK": str(rank), "HOST": host, "HOSTS": str(list(hosts))}

    def call_late(self, host: str) -> None:
        self.called.append(host)
        if host == self.unreachable:
            raise OSError(f"no way to {host}")
        self.agents.members.append(Agent(AgentPlace(len(self.agents.members), host, ()), CREDIT, late=True))

    def take_in(self, member: Agent, slots: int) -> tuple[str, ...]:
        self.taken.append((member.place.host, slots))
        return self.problems

    def answer(self) -> None:
        """The agent that was called last reports on its host."""
        self.agents.changed(self.agents.members[-1])


class Job:
    """One elastic job without processes. Rank 0 runs on the launcher's host, and agent 0 runs no rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.supervisor = Clock(), Supervising()
        monkeypatch.setattr(growth_module, "time", self.clock)
        monkeypatch.setattr(growth_module, "is_this_host", lambda host, resolve: host == "me")
        self.pool = AgentPool([AgentPlace(0, "elsewhere", ())], SshLauncher(), lambda text: None)
        self.server = Server(8, EchoCoordinator(), agents=self.pool)
        self.told: list[tuple[int, object]] = []
        self.ranks: list[tuple[int, int]] = []  # that the server was told of, with their hosts
        self.dismissed: list[tuple[tuple[int, ...], str]] = []
        self.begun_here: list[tuple[int, list[int]]] = []
        self.said: list[str] = []
        self.over = ""
        self.world: tuple[int, tuple[LaunchedRank, ...]] = (1, (LaunchedRank(0),))
        monkeypatch.setattr(self.server, "tell", lambda agent, data: self.told.append((agent, decode_to_agent(data))))
        monkeypatch.setattr(self.server, "rank_started", lambda rank, host: self.ranks.append((rank, host)))
        monkeypatch.setattr(self.server, "dismiss_ranks", lambda *which: self.dismissed.append(which))
        self.pool.call((), self.server, str, {}, 3.0, Look("/", (), "sh", (), "", 0, 0))
        self.remote = Remote(self.pool)
        self.table = HostTable(slots(a=1), (0,), 8, 3, COOLDOWN_S, 0)
        revival = Revival(
            3,
            1.0,
            lambda rank: self.table.hosts[self.table.host_of(rank)].reached,
            lambda: self.over,
            lambda: False,
            lambda: self.world,
        )
        screen = Screen(bytearray().extend)
        self.pool.streams.output = Output((screen, screen), 8)
        self.growth = Growth(self.table, revival, self._begin_here, self.server, self.remote, self.said.append)

    def attach(self, discovery: HostDiscovery | None = None) -> None:
        self.growth.attach(cast(Supervisor, self.supervisor), discovery)

    def _begin_here(self, rank: int, hosts: Sequence[int]) -> Watched:
        self.begun_here.append((rank, list(hosts)))
        return self.pool.ranks.all()[0] if self.pool.ranks.all() else cast(Watched, None)


@pytest.fixture
def unattached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(monkeypatch)
    yield made
    made.growth.close()
    made.pool.close()
    made.server.close()


@pytest.fixture
def job(unattached: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a job whose thread for discovery sleeps. The test itself says which hosts there are."""
    monkeypatch.setattr(growth_module, "TICK_S", 3600.0)
    unattached.attach()
    return unattached


def test_a_new_host_is_called_and_gets_ranks_when_its_agent_has_reported(job: Job) -> None:
    """No more ranks are started than the job may have, and each process is told where all ranks are."""
    job.growth.found(slots(a=1, b=3))
    assert (job.remote.called, job.supervisor.started) == (["b"], [])
    job.growth.found(slots(a=1, b=3))
    assert job.remote.called == ["b"], "it is being called"
    job.remote.answer()
    assert job.remote.taken == [("b", 3)]
    assert job.supervisor.started == [1, 2]
    assert job.said == ["rank 1 is started on b", "rank 2 is started on b"]
    for rank in (1, 2):
        assert job.growth.begin(rank).rank == rank
    assert job.ranks == [(1, 1), (2, 1)], "the server knows of a process before it can say anything"
    variables = {"HOST": "b", "HOSTS": "[0, 1, 1]"}
    assert job.told == [(1, Again(RankTask(rank, {"RANK": str(rank), **variables}, 1))) for rank in (1, 2)]
    assert [job.growth.host_name(rank) for rank in range(4)] == ["a", "b", "b", ""]


def test_more_slots_of_this_host_are_used_without_an_agent(job: Job) -> None:
    """Host discovery may know this host by another name than the job does."""
    job.growth.found(slots(me=2))
    assert (job.remote.called, job.supervisor.started) == ([], [1])
    job.growth.begin(1)
    assert (job.begun_here, job.told) == ([(1, [0, 0])], [])


def test_a_lost_host_is_not_called_by_who_cannot_call_hosts(job: Job) -> None:
    """A successor of the launcher: it would say in vain after each cool-down that it cannot."""
    job.growth.found(slots(a=1, b=1))
    job.remote.answer()
    job.remote.calls_hosts = False
    job.pool.silent(1, 3.0)
    job.growth.delay_s(End(1, LOST, job.clock.now_s, lost="its host is gone"))
    job.clock.now_s += 100.0
    job.growth._act()
    assert job.remote.called == ["b"] and "cannot take part" not in "".join(job.said)


@pytest.mark.parametrize("how", ["discovery", "its agent says so"])
def test_the_ranks_of_a_host_that_leaves_are_dismissed(how: str, job: Job) -> None:
    job.growth.found(slots(a=1, b=2))
    job.remote.answer()
    if how == "discovery":
        job.growth.found(slots(a=1))
    else:
        job.pool.heard(1, encode(Leaves()))
    assert job.dismissed == [((1, 2), "b leaves the job")]
    assert job.said[-1] == "b leaves the job: ranks 1-2 will leave the training"
    for rank in (1, 2):
        assert job.growth.delay_s(End(rank, 0, job.clock.now_s)) is None
    job.growth.found(slots(a=1, c=1))
    assert job.remote.called == ["b", "c"] and job.supervisor.started == [1, 2], "another host takes the place"
    job.remote.answer()
    assert len(job.supervisor.started) == 3 and job.growth.host_name(job.supervisor.started[-1]) == "c"


def test_a_host_that_left_before_a_successor_could_hear_it_leaves(unattached: Job) -> None:
    """Its agent tells it when it comes to the successor, which then knows nothing of its ranks."""
    job = unattached
    job.pool.members.append(Agent(AgentPlace(1, "b", (1,)), CREDIT))
    job.pool.members[-1].wants_to_leave = True
    job.table.found(slots(a=1, b=1))
    job.table.hosts[1].reached = True
    assert [type(decision).__name__ for decision in job.table.decide(job.clock.now_s)] == ["Start"]
    job.attach()
    assert job.dismissed == [((1,), "b leaves the job")]


def test_a_rank_that_dies_on_a_host_that_leaves_is_not_started_there_again(job: Job) -> None:
    """Often the signal that tells the agent of it, or the one after it, ends the rank, too."""
    job.growth.found(slots(a=1, b=2))
    job.remote.answer()
    job.pool.heard(1, encode(Leaves()))
    assert job.dismissed == [((1, 2), "b leaves the job")]
    end = End(1, -15, job.clock.now_s)
    assert job.growth.delay_s(end) is None
    assert job.growth.otherwise(end) == "it is started again when a host has room for it"
    with pytest.raises(OSError, match="its host leaves the job"):
        job.growth.begin(2)  # its restart was due
    job.growth.found(slots(a=1, c=1))
    job.remote.answer()
    assert job.growth.host_name(1) == "c"


def test_a_process_that_cannot_be_started_is_tried_on_another_host(job: Job) -> None:
    """As one that fails again and again: its host is left out for a while."""
    job.growth.found(slots(a=1, b=1))
    job.remote.answer()
    for delay_s in (1.0, 2.0, 4.0, None):
        end = End(1, LOST, job.clock.now_s, lost="it cannot be started again: No space left on device")
        assert job.growth.delay_s(end) == delay_s
    assert job.growth.otherwise(end) == "its host is left out for 10 s"
    job.growth.found(slots(a=1, b=1, c=1))
    assert job.remote.called == ["b", "c"]


def test_the_loss_of_a_host_is_known_when_the_ends_of_its_ranks_are_judged(
    unattached: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no start is tried there, whatever comes first to the supervisor's thread."""
    monkeypatch.setattr(growth_module, "TICK_S", 3600.0)
    job = unattached
    job.table.found(slots(a=1, b=2))
    job.table.decide(0.0)
    job.table.reached(1)
    job.table.decide(0.0)
    job.pool.members.append(Agent(AgentPlace(1, "b", (1, 2)), CREDIT))
    ends: list[End] = []
    supervisor = Supervisor(
        job.pool.ranks.all(),
        grace_s=60.0,
        ended=ends.append,
        say=job.said.append,
        revival=job.growth,
        begin=job.growth.begin,
    )
    job.growth.attach(supervisor, None)
    job.pool.ranks.attach(supervisor)
    job.pool.silent(1, 3.0)
    supervisor.run()
    assert [(end.rank, end.certain) for end in ends] == [(1, False), (2, False)]
    assert len(job.said) == 2 and all(line.endswith("when a host has room for it") for line in job.said)


def test_a_lost_host_is_called_again_after_its_cooldown(job: Job) -> None:
    """Its new agent starts the ranks again, and each process knows how many there were before it."""
    entries = slots(a=1, b=2)
    job.growth.found(entries)
    job.remote.answer()
    for rank in (1, 2):
        job.growth.begin(rank)
    job.told.clear()
    job.pool.silent(1, 3.0)
    for rank in (1, 2):
        end = End(rank, LOST, job.clock.now_s, lost="its host b is gone (no message from it for 3 s)")
        assert job.growth.delay_s(end) is None
        assert job.growth.otherwise(end) == "it is started again when a host has room for it"
    job.clock.now_s += COOLDOWN_S[0] - 0.1
    job.growth.found(entries)
    assert job.remote.called == ["b"]
    job.clock.now_s += 0.1
    job.growth.found(entries)
    assert job.remote.called == ["b", "b"]
    job.remote.answer()
    assert job.supervisor.started == [1, 2, 1, 2]
    job.told.clear()
    job.growth.begin(1)
    ((agent, message),) = job.told
    assert agent == 2 and isinstance(message, Again) and (message.task.rank, message.task.start) == (1, 2)


@pytest.mark.parametrize("how", ["no command", "lost before it reported", "unfit"])
def test_a_host_that_cannot_take_part_is_named_and_left_out_for_a_while(how: str, job: Job) -> None:
    """Another host takes its place."""
    if how == "no command":
        job.remote.unreachable = "b"
    elif how == "unfit":
        job.remote.problems = ("Python 2.7 there", "ddlcore not installed there")
    job.growth.found(slots(a=1, b=2))
    if how == "lost before it reported":
        job.pool.members[-1].gone = "b: no such host"
    if how != "no command":
        job.remote.answer()
    why = {
        "no command": "no agent can be started: no way to b",
        "lost before it reported": "no such host",
        "unfit": "Python 2.7 there; ddlcore not installed there",
    }[how]
    assert job.said == [f"b cannot take part: {why}"]
    assert job.supervisor.started == []
    job.remote.problems = ()
    job.growth.found(slots(a=1, b=2, c=2))
    assert job.remote.called == ["b", "c"]
    job.clock.now_s += COOLDOWN_S[0]
    job.growth.found(slots(a=1, b=2))
    assert job.remote.called == ["b", "c", "b"]


def test_nothing_is_started_when_no_world_can_begin(job: Job) -> None:
    job.over = "too few ranks"
    job.growth.found(slots(a=2, b=2))
    assert (job.remote.called, job.supervisor.started, job.said) == ([], [], [])


# --- asking for hosts


class Discovery(HostDiscovery):
    """Answers with what the test has put in; between the answers it is asked in vain."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[list[HostSlots] | Exception] = queue.SimpleQueue()

    def hosts(self) -> Sequence[HostSlots]:
        answer = self.answers.get(timeout=PATIENCE_S)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_host_discovery_is_asked_again_and_again(unattached: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers reach the host table in the supervisor's thread. An error changes no host, and is told once."""
    job, discovery = unattached, Discovery()
    tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    monkeypatch.setattr(growth_module, "TICK_S", 0.001)
    monkeypatch.setattr(job.supervisor, "do", lambda task: None if task == job.growth._act else tasks.put(task))
    job.attach(discovery)

    def answer(hosts: list[HostSlots] | Exception) -> None:
        discovery.answers.put(hosts)
        tasks.get(timeout=PATIENCE_S)()

    answer(slots(a=1))
    assert job.remote.called == []
    answer(slots(a=1, b=1))
    assert job.remote.called == ["b"]
    for error in (ValueError("the script ended with 3"), ValueError("the script ended with 3"), KeyError("host")):
        discovery.answers.put(error)
    discovery.answers.put([HostSlots("localhost", 2), HostSlots("127.0.0.1", 1)])
    answer(slots(a=1))
    assert job.said == [
        "host discovery: the script ended with 3; the hosts stay as they were",
        "host discovery: KeyError: 'host'; the hosts stay as they were",
        "host discovery: the list of hosts: localhost and 127.0.0.1 are both this machine; name each host once, with all its "
        "slots; the hosts stay as they were",
    ]
    assert job.table.hosts[1].slots == 0
    job.growth.close()
    discovery.answers.put(slots(a=1))


def test_starts_do_not_wait_for_host_discovery(unattached: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that finds hosts may hang."""
    job, acted = unattached, threading.Event()
    monkeypatch.setattr(growth_module, "TICK_S", 0.001)
    monkeypatch.setattr(job.supervisor, "do", lambda task: acted.set() if task == job.growth._act else None)
    discovery = Discovery()  # it has no answer
    job.attach(discovery)
    assert acted.wait(PATIENCE_S)
    job.growth.close()
    discovery.answers.put(slots(a=1))


def test_a_host_whose_call_hangs_does_not_keep_another_one_from_being_called(job: Job) -> None:
    """ssh has a connection, but never gets a shell."""
    job.growth.found(slots(a=1, b=2, c=2))
    assert job.remote.called == ["b"]
    job.clock.now_s += 60.5
    job.growth._act()
    assert job.remote.called == ["b", "c"]
    assert job.said[-1] == "b cannot take part: it has not answered within 60 s"
    assert job.pool.members[1].gone and (1, Quit()) in job.told, "if it answers later, it is to end"


def test_ranks_that_are_lost_before_the_training_begins_wait_for_the_host_that_is_called(job: Job) -> None:
    expects: list[bool] = []
    job.growth.found(slots(a=1, b=2))
    expects.append(job.growth.expects)  # no: a world has begun
    job.world = (0, ())
    expects.append(job.growth.expects)
    job.over = "too few"
    expects.append(job.growth.expects)
    assert job.growth.has_failed([1])
    job.over = ""
    job.growth.delay_s(End(0, 255, job.clock.now_s, lost="its host is gone"))
    expects.append(job.growth.expects)
    job.growth.delay_s(End(0, 1, job.clock.now_s))
    expects.append(job.growth.expects)  # no: a mistake in the script would end the ranks there, too
    assert expects == [False, True, False, True, False]


def test_no_host_is_expected_that_is_not_called(job: Job) -> None:
    job.world = (0, ())
    assert not job.growth.expects
    job.growth.found(slots(a=1, b=2))
    job.remote.answer()
    assert not job.growth.expects, "it has answered"
