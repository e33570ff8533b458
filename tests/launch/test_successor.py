"""A successor of a lost launcher: it takes over the agents and opens the next world, and a file tells how the job ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddlcore.control.client import connect
from ddlcore.control.credentials import Access, KeyPair
from ddlcore.control.listening import tcp_listener, tcp_name
from ddlcore.control.relay import Relay
from ddlcore.coordinator.membership import ElasticMembership
from ddlcore.launch.agents.agent_ranks import AgentRanks
from ddlcore.launch.agents.succession import SuccessorTask, encode_task
from ddlcore.launch.agents.wire import (
    Adopt,
    Adopted,
    AgentFinished,
    Ended,
    FromAgent,
    Handover,
    Heir,
    Quit,
    Release,
    ToAgent,
    decode_to_agent,
    encode,
)
from ddlcore.launch.job import growth, successor
from ddlcore.launch.output.output import Output
from ddlcore.launch.ranks.exchange import nameless_file, write_all
from ddlcore.launch.ranks.exit_status import STOPPED
from ddlcore.messages.elastic import Finished as TrainingFinished
from ddlcore.messages.elastic import NextWorld, Opened, Register
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import Hello
from ddlcore.messages.to_rank import FromCoordinator, Outgoing, Refused, Welcome
from ddlcore.version import VERSION

PATIENCE_S = 40.0
LAST_WORLD = Opened((1, 0), ((0, 0), (1, 0)), (0, 1), (0, 1), 5, (1, 0))  # of the launcher that is lost


class OrphanedAgent:
    """An agent that comes to the successor with one rank, which is a thread of this process."""

    def __init__(
        self,
        access: Access,
        place: int,
        worlds: tuple[Opened, ...],
        ended: bool = False,
        until: type[ToAgent] = Adopted,
    ) -> None:
        self.place = place
        self.words: list[ToAgent] = []
        self.opened: list[Opened] = []
        self.gone = ""
        self._changed = threading.Condition()
        self._relay = Relay(access, place, heard=self._hear, gone=self._part, silence_s=PATIENCE_S)
        self._relay.start()
        running, over = (((place, 0), 200 + place),), (((place, 0), 0),)
        self.say(Adopt(100 + place, () if ended else running, over if ended else (), worlds))
        self.until(until)

    def say(self, message: FromAgent) -> None:
        self._relay.say(encode(message))

    def _hear(self, data: bytes) -> None:
        with self._changed:
            message = decode_to_agent(data)
            self.words.append(message)
            self._changed.notify_all()

    def _part(self, reason: str) -> None:
        with self._changed:
            self.gone = reason
            self._changed.notify_all()

    def until(self, kind: type[ToAgent]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(isinstance(word, kind) for word in self.words), PATIENCE_S), kind

    def train(self, last: Opened = LAST_WORLD) -> list[FromCoordinator]:
        """Register the rank, of the world ``last``, for the next one, enter that, and end the training.

        Return what the rank was told.
        """
        heard = []
        channel, store = connect(self._relay.job_file, self.place)
        try:
            generation = last.ballot[0]
            channel.send(Register(PROTOCOL, VERSION, generation, 5, "its launcher is lost", 0, last.ballot))
            (world,) = channel.receive(PATIENCE_S)
            heard.append(world)
            if not isinstance(world, NextWorld):
                return heard
            channel.send(Hello(self.place, (), generation + 1, PROTOCOL, VERSION, 0))
            heard += channel.receive(PATIENCE_S)
            channel.send(TrainingFinished(generation + 1))
        finally:
            channel.close()
            store.close()
        return heard

    def end(self, code: int) -> None:
        """Tell how the rank has ended, and end when the successor lets the agent go."""
        self.say(Ended(self.place, code))
        self.finish()

    def finish(self) -> None:
        self.until(Release)
        self.say(AgentFinished())

    def close(self) -> None:
        self._relay.close()


class Orphans:
    """A job of one rank on each host, whose launcher is lost. Its successor runs in the main thread of this process.

    ``at`` are the numbers of the hosts that are left; each has the rank and the agent with its number.
    """

    def __init__(
        self, directory: Path, at: tuple[int, ...] = (0, 1), worlds: tuple[Opened, ...] = (LAST_WORLD,)
    ) -> None:
        self.directory = directory
        self._worlds = worlds
        keys, clients = KeyPair(), KeyPair()
        listener = tcp_listener("tcp://127.0.0.1:0")
        endpoint = tcp_name(listener)
        self.access = Access(endpoint, 0, keys.public, clients.public, clients.secret)
        heirs = tuple(Heir(agent, f"h{agent}", endpoint, keys.public, (), "127.0.0.1", 1) for agent in at)
        count = 1 + max(at)
        hosts = tuple((f"h{host}", 1) for host in range(count))
        meet = ("127.0.0.1", 1)
        handover = Handover(heirs, clients.public, clients.secret, {}, hosts, count, count, "ssh", meet, str(directory))
        task = nameless_file()
        write_all(task, encode_task(SuccessorTask(handover, at[0], keys.public, keys.secret, at, "it is gone")))
        self._arguments = [str(task), str(listener.detach())]
        self.failures: list[BaseException] = []

    def succeed(self, monkeypatch: pytest.MonkeyPatch, *agents: Callable[[], None]) -> None:
        """Run the successor to its end, and meanwhile each of ``agents`` in a thread."""
        threads = [threading.Thread(target=self._play, args=(agent,)) for agent in agents]
        for thread in threads:
            thread.start()
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup2", lambda fd, onto: onto)  # this process keeps its stdout and stderr
            assert successor.main(self._arguments) == 0
        for thread in threads:
            thread.join(PATIENCE_S)
        if self.failures:
            raise self.failures[0]

    def _play(self, agent: Callable[[], None]) -> None:
        try:
            agent()
        except BaseException as error:  # it is raised in the main thread
            self.failures.append(error)

    def agent(self, place: int, ended: bool = False, until: type[ToAgent] = Adopted) -> OrphanedAgent:
        """Return the agent of the host ``place``, whose rank runs, or has ended with 0, when it has its answer ``until``."""
        return OrphanedAgent(self.access, place, self._worlds, ended, until)

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    @property
    def code(self) -> str:
        return (self.directory / "exit_code").read_text()


@pytest.fixture
def place_of_successor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process the settings of a job, and its own signal handlers back."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setenv("DDL_MIN_NP", "1")
    monkeypatch.setenv("DDL_RESTARTS", "0")
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def orphans(tmp_path: Path, place_of_successor: None) -> Orphans:
    return Orphans(tmp_path / "continued")


def test_a_successor_opens_the_next_world_and_ends_the_job(orphans: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank goes on in one world that only the successor can have opened, and its agent knows of it before the rank."""
    monkeypatch.setattr(growth, "TICK_S", 0.01)
    heard: dict[int, list[FromCoordinator]] = {}
    agents: dict[int, OrphanedAgent] = {}

    def play(place: int) -> None:
        agent = agents[place] = orphans.agent(place)
        try:
            agent.until(Handover)
            heard[place] = agent.train()
            agent.end(0)
        finally:
            agent.close()

    orphans.succeed(monkeypatch, lambda: play(0), lambda: play(1))
    assert orphans.code == "0\n", orphans.output
    assert "it is gone: this process on h0 takes the place of the launcher" in orphans.output
    for place in (0, 1):
        world, welcome, *_ = heard[place]  # on a busy machine, what follows the end of the other rank comes along
        assert isinstance(world, NextWorld) and isinstance(welcome, Welcome)
        assert (world.ballot, world.members, world.hosts) == ((2, 1), (0, 1), (0, 1))
        told = [word for word in agents[place].words if isinstance(word, Opened)]
        assert told and {(one.ballot, one.places, one.steps) for one in told} == {((2, 1), (0, 1), 5)}
        handovers = [word for word in agents[place].words if isinstance(word, Handover)]
        ports = {heir.agent: bool(heir.endpoint) for heir in handovers[-1].heirs}
        assert ports == {0: False, 1: True}, "the next successor runs on another host"


def test_an_older_world_does_not_count_if_a_rank_registers_before_all_agents_have_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place_of_successor: None
) -> None:
    """Ranks 0 and 1 were alone for a while, then trained with rank 2, and the host of rank 0 and the launcher is lost.

    Rank 1 tells that the world of all three has begun. The agents still keep the world of the two, in which rank 0 would
    decide. What the second agent tells comes later, as from a host that is busy.
    """
    monkeypatch.setattr(growth, "TICK_S", 0.01)
    older = Opened((2, 0), ((0, 0), (1, 0)), (0, 1), (0, 1, 2), 5, (1, 0))
    newer = Opened((3, 0), ((0, 0), (1, 0), (2, 0)), (0, 1, 2), (0, 1, 2), 5, (2, 0))
    job = Orphans(tmp_path / "of three", (1, 2), (older, newer))
    registered = threading.Event()
    register = ElasticMembership.register
    heard: dict[int, list[FromCoordinator]] = {}

    def register_and_tell(
        membership: ElasticMembership, place: LaunchedRank, message: Register
    ) -> Outgoing[LaunchedRank]:
        told = register(membership, place, message)
        registered.set()
        return told

    monkeypatch.setattr(ElasticMembership, "register", register_and_tell)

    def play(place: int) -> None:
        if place == 2:
            assert registered.wait(PATIENCE_S)
        agent = job.agent(place)
        try:
            heard[place] = agent.train(newer)
            agent.end(0)
        finally:
            agent.close()

    job.succeed(monkeypatch, lambda: play(1), lambda: play(2))
    assert job.code == "0\n", job.output
    for place in (1, 2):
        assert isinstance(world := heard[place][0], NextWorld) and (world.ballot, world.members) == ((4, 2), (1, 2))


def test_the_exit_code_is_that_of_the_rank_that_failed(orphans: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else tells how the job has ended: its launcher, which the user has started, is lost."""

    shown: list[bool] = []

    def last_lines(output: Output, rank: int) -> list[str]:
        shown.append(not output._thread.is_alive())
        return ["ValueError: boo"]

    monkeypatch.setattr(Output, "last_lines", last_lines)

    def play(place: int) -> None:
        agent = orphans.agent(place)
        try:
            agent.end(3 * place)
        finally:
            agent.close()

    orphans.succeed(monkeypatch, lambda: play(0), lambda: play(1))
    assert orphans.code == "3\n", orphans.output
    assert shown == [True], "its last lines are asked for when all has been shown"
    assert "rank 1 on h1 failed first: it exited with code 3" in orphans.output


def test_a_job_that_was_complete_has_succeeded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place_of_successor: None
) -> None:
    """Rank 0 still saved the model when the launcher was lost, and its agent has come; the other has ended before."""
    monkeypatch.setattr(growth, "TICK_S", 0.01)
    job = Orphans(tmp_path / "continued", worlds=(replace(LAST_WORLD, complete=True),))
    started: list[int] = []
    monkeypatch.setattr(AgentRanks, "again", lambda ranks, host, rank, *_: started.append(rank))

    def play(place: int) -> None:
        agent = job.agent(place, ended=place == 1)
        try:
            if place == 0:
                time.sleep(0.1)  # the successor looks ten times whether there is something to start
                agent.end(0)
            else:
                agent.finish()
        finally:
            agent.close()

    job.succeed(monkeypatch, lambda: play(0), lambda: play(1))
    assert job.code == "0\n" and started == [], job.output


def test_the_exit_codes_of_ranks_that_ended_before_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place_of_successor: None
) -> None:
    """All of them did, so nobody is left to take over; they had agreed to stop."""
    job = Orphans(tmp_path / "continued", worlds=(replace(LAST_WORLD, complete=True, stopped="SIGTERM"),))

    def play(place: int) -> None:
        agent = job.agent(place, ended=True)
        try:
            agent.finish()
        finally:
            agent.close()

    job.succeed(monkeypatch, lambda: play(0), lambda: play(1))
    assert job.code == f"{STOPPED}\n", job.output


def test_a_successor_without_a_quorum_leaves_the_exit_code_to_the_other_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place_of_successor: None
) -> None:
    """Both may write into the same directory."""
    monkeypatch.setattr(successor, "_GATHER_S", 1.0)
    three = Opened((1, 0), ((0, 0), (1, 0), (2, 0)), (0, 1, 2), (0, 1, 2), 5, (1, 0))
    job = Orphans(tmp_path / "continued", (1, 2), worlds=(three,))

    def play() -> None:
        agent = job.agent(1)
        try:
            (refused,) = agent.train(three)
            assert isinstance(refused, Refused) and "only 1 of 3" in refused.text
            agent.end(1)
        finally:
            agent.close()

    job.succeed(monkeypatch, play)
    assert [path.name for path in job.directory.glob("exit_code*")] == ["exit_code.h1"]


def test_an_agent_that_the_launcher_had_given_up_is_told_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place_of_successor: None
) -> None:
    """Others may run at the places of its ranks."""
    monkeypatch.setattr(growth, "TICK_S", 0.01)
    three = Opened((1, 0), ((0, 0), (2, 0)), (0, 2), (0, 1, 2), 5, (1, 0))
    job = Orphans(tmp_path / "continued", (0, 2), worlds=(three,))
    gone = threading.Event()

    def play(place: int) -> None:
        agent = job.agent(place)
        try:
            agent.train(three)
            assert gone.wait(PATIENCE_S)
            agent.end(0)
        finally:
            agent.close()

    def given_up() -> None:
        agent = job.agent(1, until=Quit)
        gone.set()
        agent.close()

    job.succeed(monkeypatch, lambda: play(0), lambda: play(2), given_up)
    assert job.code == "0\n", job.output


def test_a_directory_that_cannot_be_written_ends_no_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place_of_successor: None
) -> None:
    """The output then goes to a new folder among the temporary files, and its first line says so."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(successor, "_GATHER_S", 0.1)
    job = Orphans(tmp_path / "file" / "continued")
    job.succeed(monkeypatch)
    (job.directory,) = tmp_path.glob("ddl-continued-*")
    assert job.code == "1\n"
    assert job.output.startswith(f"ddl run: {tmp_path}/file/continued: Not a directory; the output is here instead\n")


@pytest.mark.parametrize("full", ["output", "exit_code"])
def test_a_disk_that_is_full_ends_no_job(full: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written from then on is in a folder for temporary files. Nobody finds a file without the exit code."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "dup2", lambda fd, onto: onto)
    directory = tmp_path / "continued"
    directory.mkdir()
    (directory / {"output": "output", "exit_code": f".exit_code.{os.getpid()}"}[full]).symlink_to("/dev/full")
    files = successor._Files(directory)
    files.write(b"a line\n")
    files.end("exit_code", 3)
    (instead,) = tmp_path.glob("ddl-continued-*")
    note = f"ddl run: {directory}: No space left on device; the output is here instead\n"
    assert (instead / "output").read_text() == (f"{note}a line\n" if full == "output" else note)
    assert [path.name for path in (instead / "exit_code", directory / "exit_code") if path.exists()] == ["exit_code"]
    assert (instead / "exit_code").read_text() == "3\n"


def test_a_successor_to_whom_nobody_comes_fails(orphans: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that comes later is told to end, for its ranks count as lost."""
    monkeypatch.setattr(successor, "_GATHER_S", 0.1)
    orphans.succeed(monkeypatch)
    assert orphans.code == "1\n", orphans.output
    assert "no agent has come that knows of a world of this job" in orphans.output
