"""An agent starts ranks again when its launcher asks for it, and tells how each process ends."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from ddlcore.control.credentials import Access
from ddlcore.control.server import Server
from ddlcore.launch.agents import agent as agent_module
from ddlcore.launch.agents.bootstrap import AgentTask
from ddlcore.launch.agents.succession import Succession
from ddlcore.launch.agents.wire import (
    CHUNK_BYTES,
    Ack,
    Adopt,
    Adopted,
    Again,
    AgentFinished,
    Begin,
    Begun,
    Data,
    Ended,
    FromAgent,
    Handover,
    Heir,
    Here,
    Leaves,
    Quit,
    RankTask,
    Release,
    Signal,
    ToAgent,
    decode_from_agent,
    encode,
)
from ddlcore.launch.ranks.supervisor import LOST
from ddlcore.messages.elastic import Opened
from tests.control.echo import EchoCoordinator

PATIENCE_S = 40.0
SCRIPT = 'echo "$RANK $NUMBER"; [ "$NUMBER" = 2 ] && exit 5; exec sleep 60'
Kind = TypeVar("Kind", bound=FromAgent)


class Hearing:
    """The server of a launcher or of its successor, and what agents tell it."""

    def __init__(self, address: str = "") -> None:
        self._told: queue.SimpleQueue[FromAgent] = queue.SimpleQueue()
        self._waiting: list[FromAgent] = []
        self.server = Server(4, EchoCoordinator(), address, agents=self, silence_s=PATIENCE_S)
        self.server.start()

    def heard(self, agent: int, data: bytes) -> None:
        self._told.put(decode_from_agent(data))

    def silent(self, agent: int, silence_s: float) -> None:
        raise AssertionError("the agent was not heard of")

    @property
    def access(self) -> Access:
        return self.server.agent_access(self.server.agents_endpoint)

    def tell(self, *messages: ToAgent) -> None:
        for message in messages:
            self.server.tell(0, encode(message))

    def next(self, *kinds: type[Kind]) -> Kind:
        """Return the next message of these kinds. Others wait: output and ends come by different threads."""
        for message in self._waiting:
            if isinstance(message, kinds):
                self._waiting.remove(message)
                return message
        while not isinstance(message := self._told.get(timeout=PATIENCE_S), kinds):
            self._waiting.append(message)
        return message

    def reads(self, rank: int, text: str) -> bool:
        """Return whether the next output, apart from the ends of streams, is ``text``."""
        while not (piece := self.next(Data)).data:
            pass
        return piece == Data(rank, "stdout", text.encode())


class LaunchingSide(Hearing):
    """A launcher's server, and one agent that runs in a thread of this process. Its ranks are processes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: list[int] = []
        self._agents: queue.SimpleQueue[agent_module._Agent] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.agent = self._agents.get(timeout=PATIENCE_S)
        self.next(Here)

    def _run(self) -> None:
        agent = agent_module._Agent(AgentTask(self.access, PATIENCE_S, (0,)), 0)
        self._agents.put(agent)
        self.codes.append(agent.run())

    def begin(self, command: tuple[str, ...], *ranks: RankTask, stdin_rank: int = -1, stays: bool = True) -> Begun:
        environ = {"PATH": os.environ["PATH"]}
        self.tell(Begin(command, environ, (), (), ranks, stdin_rank=stdin_rank, stays=stays))
        return self.next(Begun)

    def join(self) -> None:
        """Wait for the end of the agent."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.tell(Quit())
        self._thread.join(PATIENCE_S)
        self.server.close()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchingSide]:
    monkeypatch.setattr(agent_module, "adopt_orphans", lambda: None)  # this process is not an agent's alone
    made = LaunchingSide()
    yield made
    made.close()


def task(number: int, rank: int = 1) -> RankTask:
    return RankTask(rank, {"RANK": str(rank), "NUMBER": str(number)}, number)


def test_a_rank_is_started_again_and_again(side: LaunchingSide) -> None:
    """Each process gets the variables of its own start. The agent waits for the next one until it is released."""
    begun = side.begin(("sh", "-c", SCRIPT), task(0))
    assert begun.error == "" and len(begun.pids) == 1
    assert side.reads(1, "1 0\n")
    os.kill(begun.pids[0], signal.SIGKILL)
    assert side.next(Ended) == Ended(1, -signal.SIGKILL)
    side.tell(Again(task(1)))
    assert side.reads(1, "1 1\n")
    side.tell(Signal(1, signal.SIGTERM, True))
    assert side.next(Ended) == Ended(1, -signal.SIGTERM, start=1)
    side.tell(Again(task(2)))
    assert side.reads(1, "1 2\n")
    assert side.next(Ended) == Ended(1, 5, start=2)
    assert side.codes == []
    side.tell(Release())
    assert isinstance(side.next(AgentFinished), AgentFinished)
    side.close()
    assert side.codes == [0]


def test_one_rank_reads_the_standard_input_of_the_launcher(side: LaunchingSide) -> None:
    """Whole, more than a pipe holds, to its end. The other ranks have none."""
    text = b"".join(b"%d\n" % number for number in range(60_000))
    command = ("sh", "-c", 'cat; echo "end of $RANK"')
    side.begin(command, task(0, 0), task(0, 1), stdin_rank=0, stays=False)
    for at in range(0, len(text), CHUNK_BYTES):
        side.tell(Data(0, "stdin", text[at : at + CHUNK_BYTES]))
    side.tell(Data(0, "stdin", b""))
    heard: list[FromAgent] = []
    while not isinstance(message := side.next(Ack, Data, AgentFinished), AgentFinished):
        heard.append(message)
    wrote = {rank: b"".join(one.data for one in heard if isinstance(one, Data) and one.rank == rank) for rank in (0, 1)}
    assert wrote == {0: text + b"end of 0\n", 1: b"end of 1\n"}
    assert sum(one.nbytes for one in heard if isinstance(one, Ack)) == len(text)


def test_input_that_a_rank_does_not_read_is_discarded(side: LaunchingSide) -> None:
    """The launcher goes on to read its standard input, and does not wait for an acknowledgement for ever."""
    side.begin(("true",), task(0, 0), stdin_rank=0, stays=False)
    side.next(AgentFinished)
    pieces = 4
    side.tell(*[Data(0, "stdin", bytes(CHUNK_BYTES))] * pieces, Data(0, "stdin", b""))
    assert [side.next(Ack).nbytes for _ in range(pieces)] == [CHUNK_BYTES] * pieces


def test_an_agent_that_was_called_late_begins_without_ranks(side: LaunchingSide) -> None:
    """Its first process comes by Again; SIGTERM to the agent means that its host leaves the job."""
    assert side.begin(("sh", "-c", SCRIPT)) == Begun(())
    side.tell(Again(task(0, rank=3)))
    assert side.reads(3, "3 0\n")
    side.agent.host_leaves(signal.SIGTERM, None)
    assert side.next(Leaves) == Leaves()
    side.close()
    assert side.codes == [0], "Quit has killed the rank"


def test_a_process_that_cannot_be_started_again_has_ended(side: LaunchingSide, tmp_path: Path) -> None:
    """The launcher would wait for the end of this process for ever otherwise."""
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    side.begin((str(program),), task(0))
    assert side.next(Ended) == Ended(1, 0)
    program.unlink()
    side.tell(Again(task(1)))
    ended = side.next(Ended)
    assert (ended.rank, ended.returncode) == (1, LOST)
    assert ended.lost.startswith("it cannot be started again: No such file or directory")


# --- without the launcher


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_seeking() -> bool:
    """Return whether an agent of this process seeks a successor of its launcher."""
    return any(thread.name == "ddl-succession" for thread in threading.enumerate())


def test_an_agent_whose_job_has_no_successor_kills_its_ranks(side: LaunchingSide) -> None:
    """Nobody would notice them any more."""
    (pid,) = side.begin(("sh", "-c", SCRIPT), task(0)).pids
    assert side.reads(1, "1 0\n")
    side.server.close()
    side.join()
    assert not is_alive(pid)


def test_an_agent_that_cannot_even_seek_a_successor_kills_its_ranks(
    side: LaunchingSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for one for ever."""
    (pid,) = side.begin(("sh", "-c", SCRIPT), task(0)).pids
    assert side.reads(1, "1 0\n")

    def fail(*_: object) -> str:
        raise OSError("too many open files")

    monkeypatch.setattr(Succession, "is_prepared", True)
    monkeypatch.setattr(Succession, "go_on", fail)
    side.server.close()
    side.join()
    assert not is_alive(pid)


def test_an_agent_goes_on_under_a_successor_of_its_launcher(side: LaunchingSide) -> None:
    """It tells what runs on its host and which worlds it knows of, and its ranks live on."""
    (pid,) = side.begin(("sh", "-c", SCRIPT), task(0), stdin_rank=1).pids
    assert side.reads(1, "1 0\n")
    world = Opened((1, 0), ((0, 0), (1, 0)), (0, 1), (1, 0), 5, (1, 0))
    heir = Hearing("tcp://127.0.0.1:0")
    try:
        access = heir.access
        heirs = (Heir(1, "h1", access.endpoint, access.server_public, (), "127.0.0.1", 1),)
        keys = (access.client_public, access.client_secret)
        side.tell(Handover(heirs, *keys, {}, (("h0", 1), ("h1", 1)), 2, 2, "ssh", ("127.0.0.1", 1), "/nowhere"), world)
        until_s = time.monotonic() + PATIENCE_S
        while not side.agent._succession.is_prepared and time.monotonic() < until_s:
            time.sleep(0.001)
        side.server.close()
        assert heir.next(Adopt) == Adopt(os.getpid(), (((1, 0), pid),), (), (world,))
        heir.tell(Adopted(), Again(task(1, rank=3)))
        assert heir.reads(3, "3 1\n"), "it serves the successor as it has served the launcher"
        until_s = time.monotonic() + PATIENCE_S  # less than an agent waits for a successor before it gives up
        while is_seeking() and time.monotonic() < until_s:
            time.sleep(0.001)
        assert is_alive(pid) and not is_seeking()
        given = side.agent._input
        assert given is not None
        given._thread.join(PATIENCE_S)
        assert not given._thread.is_alive(), "the standard input of the launcher ends with it"
        heir.tell(Signal(1, signal.SIGTERM, True))
        assert heir.next(Ended) == Ended(1, -signal.SIGTERM)
        heir.tell(Quit())
        side.join()
        assert side.codes == [0]
    finally:
        heir.tell(Quit())
        heir.server.close()
