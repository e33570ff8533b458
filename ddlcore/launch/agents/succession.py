"""Lets the agents of an elastic job go on under a successor of their launcher, when its host or its process is lost.

It decides which agent starts the successor, and brings an agent to it. What the successor does is its own affair.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from ddlcore.control.credentials import Access, KeyPair
from ddlcore.control.listening import tcp_listener, tcp_name
from ddlcore.coordinator.quorum import Quorum
from ddlcore.launch.agents.survey import endpoint_host
from ddlcore.launch.agents.wire import Handover, Heir
from ddlcore.launch.ranks.command import own_python
from ddlcore.launch.ranks.exchange import nameless_file, read_all, write_all
from ddlcore.launch.ranks.process import die_with_launcher
from ddlcore.messages.elastic import Opened, Process

PROBE_S = 3.0  # to find out whether a host answers; its kernel does so at once
LOOK_S = 10.0  # an agent that waits for an heir looks as often whether its host still answers
FIRST_LOOK_S = 2.0  # the same for the first time: an heir that finds no quorum ends at once
ANSWER_S = 60.0  # until a successor whose host answers has started and adopts an agent, also on a slow, busy machine
_END_S = 30.0  # until a successor has written everything, after its agents have ended
_PROGRAM = "from ddlcore.launch.job.successor import main; sys.exit(main(sys.argv[1:]))"


class _Answer(enum.Enum):
    ADOPTED = enum.auto()
    GONE = enum.auto()  # this successor will not answer
    OVER = enum.auto()  # the agent ends


class SuccessorTask(msgspec.Struct, frozen=True):
    """What a successor gets from the agent that starts it."""

    handover: Handover
    agent: int  # the number of this agent
    server_public: str
    server_secret: str
    expected: tuple[int, ...]  # agents whose hosts answer; others may come, too
    reason: str  # why the launcher counts as lost


def encode_task(task: SuccessorTask) -> bytes:
    """Return ``task`` as bytes. They contain a secret key."""
    return msgspec.msgpack.encode(task)


def decode_task(data: bytes) -> SuccessorTask:
    """Return the task that ``encode_task`` has made ``data`` of."""
    return msgspec.msgpack.decode(data, type=SuccessorTask)


def probe_all(endpoints: Sequence[str], timeout_s: float = PROBE_S) -> dict[str, bool]:
    """Try to connect to each of ``endpoints`` (``tcp://IP:PORT``), and return those whose hosts have answered.

    The value of an endpoint is True if a process accepts connections there, and False if the host refuses them.
    """
    found: dict[str, bool] = {}

    def probe(endpoint: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            where = endpoint_host(endpoint), int(endpoint.rpartition(":")[2])
            try:
                socket.create_connection(where, timeout_s).close()
                found[endpoint] = True
            except ConnectionRefusedError:
                found[endpoint] = False

    threads = [threading.Thread(target=probe, args=(one,), name="ddl-probe", daemon=True) for one in endpoints]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s + 1.0
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return dict(found)


class Succession:
    """What one agent knows of the job, for the case that its launcher is lost.

    The relay's thread calls ``take`` and ``hears_of``; ``go_on`` runs in a thread of its own.
    """

    def __init__(self, agent: int) -> None:
        self._agent = agent
        self._keys = KeyPair()
        self._listener: socket.socket | None = None
        self._handover: Handover | None = None
        self._worlds: dict[tuple[int, int], Opened] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._is_over = False  # the agent ends

    def open(self, address: str) -> tuple[str, str]:
        """Open the port for a successor on this host, at ``address``. Returns the endpoint and the public key.

        Both are empty if that is not possible.
        """
        if not address:
            return "", ""
        try:
            self._listener = tcp_listener(f"tcp://{address}:0")
        except (OSError, ValueError):
            return "", ""
        return tcp_name(self._listener), self._keys.public

    def take(self, handover: Handover) -> None:
        """Take what a successor needs; it replaces what was told before."""
        self._handover = handover

    def hears_of(self, world: Opened) -> None:
        """Take the news that ``world`` opens."""
        self._worlds[world.ballot] = world
        self._worlds = {key: one for key, one in self._worlds.items() if key >= world.effective}

    @property
    def worlds(self) -> tuple[Opened, ...]:
        """The worlds that may live, as far as this agent was told."""
        return tuple(self._worlds.values())

    @property
    def is_prepared(self) -> bool:
        """Whether this agent knows enough to go on without the launcher."""
        return self._handover is not None and bool(self._worlds) and any(one.endpoint for one in self._handover.heirs)

    def adopted(self) -> None:
        """Record that a successor has taken this agent over. The relay's thread calls this."""
        self._answers.put(_Answer.ADOPTED)

    def give_up(self) -> None:
        """End ``go_on`` without success, because the agent ends. Any thread may call this."""
        self._is_over = True
        self._answers.put(_Answer.OVER)

    def go_on(
        self,
        reason: str,
        lost_endpoint: str,
        join: Callable[[Access], None],
        running: Callable[[], Collection[Process]],
    ) -> str:
        """Bring this agent to a successor of the launcher, which counts as lost for ``reason``; start it if it is due here.

        ``lost_endpoint`` is where the launcher listened, ``join`` connects to a successor, and ``running`` returns the
        processes that run on this host. Returns "" on success, otherwise why the agent has to end.
        """
        handover = self._handover
        assert handover is not None
        self._answers.put(_Answer.GONE)  # to an earlier succession that still waits
        answers = self._answers = queue.SimpleQueue()
        tried: set[int] = set()
        until_s = time.monotonic() + 2 * ANSWER_S  # ranks wait no longer
        while not self._is_over and time.monotonic() < until_s and self._answers is answers:
            answering = probe_all([lost_endpoint, *(heir.endpoint for heir in handover.heirs if heir.endpoint)])
            if answering.get(lost_endpoint):
                return "the launcher lives, but has given up the connection to this host"
            heirs = [one for one in handover.heirs if answering.get(one.endpoint)]
            # The agent of a successor whose process was lost has no port any more, but its host may live.
            lost_host = endpoint_host(lost_endpoint) if lost_endpoint in answering else ""
            bare = [one for one in handover.heirs if not one.endpoint]
            # Nor has one whose successor has just died, of which nobody was told yet: its host refuses the connection. But if
            # the launcher's host refuses it, too, the job has probably ended while this agent was cut off.
            has_ended = answering.get(lost_endpoint) is False
            refused = [one for one in handover.heirs if answering.get(one.endpoint) is False and not has_ended]
            heir = next((one for one in heirs if one.agent not in tried), None)
            # Others leave the decision to the heir: agents may tell it of deaths of which this agent does not know.
            if heir is None or heir.agent == self._agent:
                objection = self._objection(handover, [*heirs, *refused, *bare], running())
                if objection:
                    return objection
            if heir is None:
                break
            while not answers.empty():
                if answers.get() is _Answer.ADOPTED:  # by the one before, after all
                    return ""
            tried.add(heir.agent)
            if heir.agent == self._agent:
                there = [*heirs, *refused, *(one for one in bare if one.address == lost_host)]
                self._start(handover, there, reason)
            join(Access(heir.endpoint, 0, heir.server_public, handover.client_public, handover.client_secret))
            if self._await(answers, heir, until_s) is _Answer.ADOPTED:
                return ""
        # If the next succession has begun, it is no affair of this one what becomes of the agent.
        return "no successor of the launcher has answered" if self._answers is answers else ""

    def _await(self, answers: queue.SimpleQueue[_Answer], heir: Heir, until_s: float) -> _Answer:
        """Wait until the successor at ``heir`` answers, and return its answer from ``answers``; GONE if it cannot answer any more."""
        until_s = min(until_s, time.monotonic() + ANSWER_S)
        look_s, silent = min(FIRST_LOOK_S, LOOK_S), 0
        while time.monotonic() < until_s and silent < 2:
            try:
                return answers.get(timeout=max(0.0, min(look_s, until_s - time.monotonic())))
            except queue.Empty:
                lives = True if heir.agent == self._agent else probe_all([heir.endpoint]).get(heir.endpoint)
                if lives is False:  # it has ended, such as for lack of a quorum
                    return _Answer.GONE
                silent = 0 if lives else silent + 1  # a busy host may once not answer in time
            look_s = LOOK_S
        return _Answer.GONE

    def _objection(self, handover: Handover, heirs: Sequence[Heir], running: Collection[Process]) -> str:
        """Return why the part of the job that this agent can reach cannot go on; "" if it probably can.

        Only a successor knows for certain, but without this look, a host that is cut off would start one and wait for others.
        """
        names = [name for name, _ in handover.hosts]
        here = {names.index(heir.host) for heir in heirs if heir.host in names}
        newest = max(self._worlds.values(), key=lambda world: world.ballot)
        there = {process for process in newest.processes if newest.hosts[process[0]] in here}
        mine = {process for process in newest.processes if process in running}
        return Quorum([newest]).objection(there | mine)

    # --- the successor that runs on this host

    def _start(self, handover: Handover, heirs: Sequence[Heir], reason: str) -> None:
        if self._listener is None or self._process is not None:
            return
        expected = tuple(heir.agent for heir in heirs)
        keys = self._keys
        task = SuccessorTask(handover, self._agent, keys.public, keys.secret, expected, reason)
        fd = nameless_file()
        write_all(fd, encode_task(task))
        started = threading.Event()
        # The process dies with the thread that starts it, so this thread stays until the process has ended.
        args = (handover, fd, started, self._answers)
        threading.Thread(target=self._run, args=args, name="ddl-successor", daemon=True).start()
        started.wait(PROBE_S)

    def _run(self, handover: Handover, fd: int, started: threading.Event, answers: queue.SimpleQueue[_Answer]) -> None:
        assert self._listener is not None
        numbers = (fd, self._listener.fileno())
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            process = self._process = subprocess.Popen(
                own_python(_PROGRAM, *map(str, numbers)),
                env={**os.environ, **handover.variables, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,
                preexec_fn=die_with_launcher(os.getpid()),
            )
        except OSError:
            answers.put(_Answer.GONE)
            return
        finally:
            os.close(fd)
            started.set()
        self._listener.close()  # it belongs to the successor now
        process.wait()
        answers.put(_Answer.GONE)  # if it has adopted this agent, nobody waits any more

    def close(self) -> None:
        """Wait until the successor on this host, if there is one, has written everything; kill it if that takes too long."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        elif self._listener is not None:
            self._listener.close()


def task_in(fd: int) -> SuccessorTask:
    """Return the task in the file ``fd``, and close it."""
    try:
        return decode_task(read_all(fd))
    finally:
        os.close(fd)
