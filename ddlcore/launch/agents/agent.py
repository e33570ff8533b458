"""The agent: a process that starts ranks on its host for a launcher, which may be on another host.

It decides nothing by itself. When it loses its launcher, for whatever reason, it kills its ranks and ends; in an elastic
job, it goes on under a successor of the launcher, if there can be one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from ddlcore.control.credentials import Access
from ddlcore.control.files import allow_files
from ddlcore.control.relay import Relay
from ddlcore.errors import DdlInternalError
from ddlcore.launch.agents.bootstrap import ANSWER, VARIABLE, AgentTask, read_task
from ddlcore.launch.agents.forward import Forward, Input
from ddlcore.launch.agents.succession import Succession
from ddlcore.launch.agents.survey import survey
from ddlcore.launch.agents.wire import (
    Ack,
    Adopt,
    Adopted,
    Again,
    AgentFinished,
    Begin,
    Begun,
    Credit,
    Data,
    Ended,
    FromAgent,
    Handover,
    Here,
    Leaves,
    Look,
    Quit,
    RankTask,
    Release,
    Said,
    Signal,
    decode_to_agent,
    encode,
)
from ddlcore.launch.ranks.command import own_python
from ddlcore.launch.ranks.exchange import FUNCTION_PROGRAM, nameless_file, read_all, write_all
from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.process import RankProcess, adopt_orphans, die_with_launcher
from ddlcore.launch.ranks.supervisor import Supervisor
from ddlcore.launch.ranks.warmup import compile_kernels
from ddlcore.messages.coding import encode as encode_for_rank
from ddlcore.messages.elastic import CoordinatorLost, Opened, Process
from ddlcore.messages.ranks import FIRST_START, LaunchedRank
from ddlcore.observe.timeline_parts import parts_in

_PART_BYTES = 1 << 24  # read from a file at a time
_STDIN = "its standard input ended"
_QUIT_S = 1.0  # a launcher that ends sends Quit, and closes this standard input: Quit must be read first
_STARTING_S = 10.0  # until a process that is being started runs, or cannot be started
_FIRST_WORD_S = 20.0  # from the start to the launcher's first message
_Next = Look | Begin | Quit | None  # None: the launcher is gone


def main(arguments: Sequence[str]) -> int:
    """Run one agent with the command line ``arguments``, and return the exit code of the process.

    0 means that the agent ran until all its ranks had ended, or that the launcher did not ask for ranks. The exit codes
    of the ranks were sent to the launcher. 1 means that the agent could not begin, or that it lost its launcher before
    the launcher asked it to start ranks.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _leave_to_the_launcher)  # not SIG_IGN: the ranks would inherit that
    try:
        task = read_task(arguments, os.environ)
        by_stdin = not task.answers and VARIABLE not in os.environ
        os.environ.pop(VARIABLE, None)
        agent = _Agent(task, task.index(os.environ))
    except DdlInternalError as error:
        print(error, file=sys.stderr)
        return 1
    if task.answers:
        print(f"{ANSWER}{task.access.client_public}", flush=True)
    signal.signal(signal.SIGTERM, agent.host_leaves)
    for name in ("SIGUSR1", "SIGUSR2"):  # what Slurm's --signal sends to a job's steps is meant for the ranks
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), agent.pass_on)
    if by_stdin:
        threading.Thread(target=agent.watch_stdin, name="ddl-stdin", daemon=True).start()
    try:
        return agent.run()
    finally:
        agent.leave()


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _leave_to_the_launcher(number: int, frame: FrameType | None) -> None:
    """Ignore the signal ``number`` from a terminal, sshd or a batch system: the launcher decides how to react to it."""


class _Agent:
    """One agent of a job.

    The relay's thread receives the launcher's messages. The main thread handles the messages Look, Begin and Quit, and
    the relay's thread handles all other messages.
    """

    def __init__(self, task: AgentTask, index: int) -> None:
        self._endpoint = task.access.endpoint
        self._next: queue.SimpleQueue[_Next] = queue.SimpleQueue()
        self._supervisor: Supervisor | None = None
        self._input: Input | None = None
        self._files: dict[int, int] = {}  # by rank: descriptor of the file for the function's result
        self._parts: Path | None = None  # where the ranks write their parts of a timeline
        self._task_fd = -1
        self._gone = ""
        self._unheard = False  # the connection to the launcher was lost, but sshd's connection may still look open
        self._later: deque[LaunchedRank] = deque()  # ranks of Again messages that were not yet given to the supervisor
        self._tasks: dict[int, RankTask] = {}  # by rank: the data for starting another process
        self._stays = False  # the job is elastic
        self._released = False  # no rank will be started again
        self._ending = False  # the ranks are to be killed, or not to be started
        self._address = ""  # of this host, on the route to the launcher
        self._running: dict[Process, int] = {}  # the processes that run here, with their ids
        self._ended: dict[Process, int] = {}  # with their return codes
        self._starting: set[Process] = set()  # those that the launcher wants and that do not run yet
        self._leaves = False  # this host is to leave the job
        self._succession = Succession(index)
        self._is_orphan = False  # the launcher is lost, and a successor is sought
        self._relay = Relay(
            task.access,
            index,
            heard=self._hear,
            gone=self._lose,
            silence_s=task.silence_s,
            patient=task.answers,
        )
        self._credit = Credit(self._relay.say)
        self._forward = Forward(self._credit)

    def run(self) -> int:
        """Carry out the launcher's requests until the job has ended, and return this process's exit code."""
        adopt_orphans()
        self._relay.start()
        self._say(Here(os.getpid()))
        try:
            return self._serve()
        finally:
            self._relay.close()
            self._succession.close()
            if self._parts is not None:
                shutil.rmtree(self._parts, ignore_errors=True)

    def watch_stdin(self) -> None:
        """Wait until standard input ends; then kill the ranks and end the agent.

        When the command that started this agent ends, standard input ends, too.
        """
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        if self._succession.is_prepared:
            time.sleep(_QUIT_S)
        self._relay.lose(_STDIN)

    def _serve(self) -> int:
        try:
            message = self._next.get(timeout=_FIRST_WORD_S)
        except queue.Empty:
            print(
                f"the launcher does not answer at {self._endpoint}; is a firewall between? "
                "DDL_CONTROL_ADDRESS=tcp://IP:PORT makes it listen at a port that is open",
                file=sys.stderr,
            )
            return 1
        while isinstance(message, Look):
            report = survey(message, self._endpoint)
            self._address = report.address
            self._say(report)
            message = self._next.get()
        if not isinstance(message, Begin):
            if self._gone:
                print(f"lost its launcher: {self._gone}", file=sys.stderr)
            return 1 if self._gone else 0
        self._stays = message.stays
        processes = self._begin(message)
        if processes or (message.stays and self._supervisor is not None):
            self._watch(processes)
        self._say(AgentFinished())
        while not self._gone and not isinstance(
            self._next.get(), Quit | None
        ):  # until the launcher has read AgentFinished
            pass
        return 0

    # --- the relay's thread

    def _hear(self, data: bytes) -> None:
        message = decode_to_agent(data)
        if isinstance(message, Ack):
            self._credit.give(message.nbytes)
        elif isinstance(message, Signal):
            if self._supervisor is not None:
                self._supervisor.order(message.rank, message.number, message.group)
        elif isinstance(message, Again):
            self._tasks[message.task.rank] = message.task
            self._starting.add((message.task.rank, message.task.start))
            self._later.append(message.task.rank)
            self._start_later()
        elif isinstance(message, Release):
            self._released = True
            if self._supervisor is not None:
                self._supervisor.release()
        elif isinstance(message, Data):
            self._take(message)
        elif isinstance(message, Opened):
            self._succession.hears_of(message)
        elif isinstance(message, Handover):
            self._succession.take(message)
        elif isinstance(message, Adopted):
            self._is_orphan = False
            self._credit.renew()
            self._succession.adopted()
        else:
            if isinstance(message, Quit):
                self._end()
            self._next.put(message)

    def _take(self, piece: Data) -> None:
        if piece.stream == "task":
            if self._task_fd < 0:
                self._task_fd = nameless_file()
            write_all(self._task_fd, piece.data)
            self._say(Ack(len(piece.data)))
        elif self._input is not None:
            self._input.put(piece.data)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send the signal ``number``, which this agent has received, to the ranks, if they run."""
        if self._supervisor is not None:
            self._supervisor.deliver(number)

    def host_leaves(self, number: int, frame: FrameType | None) -> None:
        """In an elastic job, tell the launcher that this agent's host must leave the job.

        The launcher then lets the ranks of this host leave the training. This is the handler for SIGTERM. In a job that
        is not elastic, the signal is ignored, because the launcher decides how to react to it.
        """
        if self._stays:
            self._leaves = True
            self._say(Leaves())

    def leave(self) -> None:
        """End the sshd process that serves only this agent, if the connection to the launcher was lost.

        If this process was not started by sshd, do nothing. Without this method, sshd would wait for a long time for
        data from a dead connection.
        """
        if self._unheard and "SSH_CONNECTION" in os.environ and _name_of(os.getppid()).startswith("sshd"):
            with contextlib.suppress(OSError):
                os.kill(os.getppid(), signal.SIGTERM)

    def _lose(self, reason: str) -> None:
        self._unheard = reason != _STDIN
        over = self._ending or self._released or self._is_orphan
        if over or self._supervisor is None or not self._succession.is_prepared:
            self._part(reason)
            return
        self._is_orphan = True
        if self._input is not None:
            self._input.put(b"")  # the standard input of the launcher ends with it
        self._relay.hold(encode_for_rank(CoordinatorLost(f"the launcher is lost ({reason})")))
        threading.Thread(target=self._go_on, args=(reason,), name="ddl-succession", daemon=True).start()

    def _go_on(self, reason: str) -> None:
        try:
            why = self._succession.go_on(reason, self._endpoint, self._join, lambda: list(self._running))
        except Exception as error:  # such as too many open files: otherwise the ranks would wait forever
            why = f"no successor of the launcher could be sought: {error}"
        if why:
            self._part(f"{reason}; {why}")

    def _join(self, access: Access) -> None:
        self._endpoint = access.endpoint
        until_s = time.monotonic() + _STARTING_S
        while self._starting and not self._ending and time.monotonic() < until_s:
            time.sleep(0.01)  # a process that is not told of would be started a second time
        running = tuple(self._running.items())
        first = Adopt(os.getpid(), running, tuple(self._ended.items()), self._succession.worlds, self._leaves)
        self._relay.join(access, encode(first))

    def _part(self, reason: str) -> None:
        self._gone = self._gone or reason
        self._end()
        self._next.put(None)

    def _end(self) -> None:
        self._ending = True
        self._succession.give_up()
        self._credit.close()
        if self._supervisor is not None:
            self._supervisor.abandon()

    # --- the ranks

    def _start_later(self) -> None:
        """Start the rank of each message Again that has arrived so far.

        If the supervisor was not created yet, do nothing: this method is called again after its creation.
        """
        while self._supervisor is not None and self._later:
            with contextlib.suppress(IndexError):  # the other thread has removed the last rank
                self._supervisor.start(self._later.popleft())

    def _begin(self, begin: Begin) -> list[RankProcess]:
        """Start the ranks that ``begin`` lists, and return their processes.

        If a rank cannot be started, kill the ranks that were started before, report the reason to the launcher, and
        return []. Also return [] if the launcher has asked the agent to end.
        """
        processes: list[RankProcess] = []
        if begin.machine_code:
            compile_kernels(begin.machine_code, lambda text: self._say(Said(text)), begin.cache_dir)
        if self._ending:
            return []
        try:
            allow_files(len(begin.ranks))
            if begin.stdin_rank >= 0:
                self._input = Input(lambda nbytes: self._say(Ack(nbytes)))
            shared = self._shared_environment(begin)
            if begin.timeline:
                self._parts = Path(tempfile.mkdtemp(prefix="ddl-timeline-"))
            for rank in begin.ranks:
                processes.append(self._begin_rank(begin, rank, shared))
        except (OSError, DdlInternalError) as error:
            for process in processes:
                process.kill()
            what = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)
            self._say(Begun((), what))
            return []
        self._supervisor = Supervisor(
            processes,
            grace_s=float("inf"),  # only the launcher ends the other ranks after a failure
            ended=self._tell_end,
            say=lambda text: self._say(Said(text)),
            begin=lambda rank: self._begin_again(begin, rank, shared),
            stays=begin.stays and not self._released,
        )
        place = self._succession.open(self._address) if begin.succession else ("", "")
        self._say(Begun(tuple(process.process.pid for process in processes), "", *place))
        return processes

    def _tell_end(self, end: End) -> None:
        process = next((one for one in self._running if one[0] == end.rank), None)
        start = self._tasks[end.rank].start if end.rank in self._tasks else FIRST_START
        if process is not None:
            start = process[1]
            self._ended[process] = end.returncode
            del self._running[process]
        if not self._gone:  # otherwise the launcher would take it for the cause that this agent has killed its ranks
            self._say(Ended(end.rank, end.returncode, end.lost, start))

    def _shared_environment(self, begin: Begin) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("DDL_")}
        given = dict(begin.environ)
        if not os.path.isdir(given.get("TMPDIR", "/")):
            del given["TMPDIR"]  # it names a directory of another host
        own = {name: value for name, value in mine.items() if begin.own and name.startswith(begin.own)}
        return {**mine, **given, **own, "PWD": os.getcwd()}

    def _begin_again(self, begin: Begin, rank: LaunchedRank, shared: dict[str, str]) -> RankProcess:
        if rank in self._files:
            os.close(self._files.pop(rank))
        task = self._tasks[rank]
        try:
            process = self._begin_rank(replace(begin, stdin_rank=-1), task, shared)  # the first has read its input
        finally:
            self._starting.discard((rank, task.start))
        self._forward.add_again(rank, process.stdout, process.stderr)
        return process

    def _begin_rank(self, begin: Begin, rank: RankTask, shared: dict[str, str]) -> RankProcess:
        fds = [int(os.environ[name]) for name in begin.descriptors if os.environ.get(name, "").isdecimal()]
        command = list(begin.command)
        if not command:
            self._files[rank.rank] = nameless_file()
            fds += [self._task_fd, self._files[rank.rank]]
            numbers = (self._task_fd, self._files[rank.rank], os.getpid())
            command = own_python(FUNCTION_PROGRAM, *map(str, numbers))
        stdin = self._input.reader if self._input is not None and rank.rank == begin.stdin_rank else subprocess.DEVNULL
        process = RankProcess.begin(
            rank.rank,
            command,
            {
                **shared,
                **rank.environ,
                "DDL_JOB_FILE": self._relay.job_file,
                "DDL_TIMELINE_DIR": str(self._parts or ""),
            },
            stdin=stdin,
            pass_fds=fds,
            in_child=die_with_launcher(os.getpid()),
        )
        if stdin != subprocess.DEVNULL:
            os.close(stdin)
        self._running[rank.rank, rank.start] = process.process.pid
        return process

    def _watch(self, processes: Sequence[RankProcess]) -> None:
        assert self._supervisor is not None
        for process in processes:
            self._forward.add(process.rank, process.stdout, process.stderr)
        self._forward.start()
        if self._ending:  # the request to end arrived before the supervisor was created
            self._supervisor.abandon()
        if self._released:
            self._supervisor.release()
        self._start_later()
        self._supervisor.run()
        self._forward.drain()
        for rank, fd in self._files.items():
            self._credit.send(rank, "result", read_all(fd))
            os.close(fd)
        self._send_parts()

    def _send_parts(self) -> None:
        """Send the ranks' parts of a timeline to the launcher, including the parts of killed ranks.

        The part of a killed rank contains the events that the rank had written before its end.
        """
        for path in parts_in(self._parts) if self._parts is not None else ():
            rank, _, number = path.stem[len("rank") :].partition(".")
            with open(path, "rb") as file:
                while data := file.read(_PART_BYTES):
                    self._credit.send(int(rank), f"timeline.{number}" if number else "timeline", data)

    def _say(self, message: FromAgent) -> None:
        self._relay.say(encode(message))
