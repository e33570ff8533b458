"""Takes the place of a launcher that is lost: coordinates the ranks that its agents still run, to the end of the job.

An agent starts this program on its own host. It calls no further hosts, shows nothing on a screen, and takes no signals:
what ranks write and how the job ends is found in files.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ddlcore.config.loading import Settings
from ddlcore.contracts.launcher import AgentPlace, HostSlots
from ddlcore.control.credentials import KeyPair
from ddlcore.control.server import PreparedListener, Server
from ddlcore.coordinator.membership import Coordinating, ElasticMembership
from ddlcore.coordinator.quorum import Quorum
from ddlcore.launch.agents.agent_pool import AgentPool
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.orphans import OrphanedAgents
from ddlcore.launch.agents.succession import ANSWER_S, SuccessorTask, task_in
from ddlcore.launch.agents.wire import Handover, Heir
from ddlcore.launch.job.growth import Growth, revival_of
from ddlcore.launch.job.handover import HandingOver, tell_of_world
from ddlcore.launch.job.history import History
from ddlcore.launch.job.host_table import HostTable, cooldown_range
from ddlcore.launch.job.network import ObservedCoordinator
from ddlcore.launch.job.running import RunningJob
from ddlcore.launch.job.watch import Watches
from ddlcore.launch.output.output import Output
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.environment import HostFacts, RankVariables, late_environment
from ddlcore.launch.ranks.exit_status import End, first_failure, summary
from ddlcore.launch.ranks.supervisor import Supervisor, Watched
from ddlcore.messages.elastic import Opened, Process
from ddlcore.messages.ranks import LaunchedRank, StartNumber
from ddlcore.messages.to_rank import Outgoing
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_membership, build_sessions
from ddlcore.process.job import log_at
from ddlcore.types import Placement

log = logging.getLogger("ddl")
_GATHER_S = ANSWER_S / 2  # an agent waits longer for this process than this process waits for agents


class _Adopted:
    """The agents that have come to this successor, in the part of a remote launch."""

    calls_hosts = False  # only the lost launcher knew how

    def __init__(self, agents: AgentPool, handover: Handover, settings: Settings) -> None:
        self.agents = agents
        self._handover = handover
        self._settings = settings
        self._heirs = {heir.host: heir for heir in handover.heirs}

    def own_variables(self, rank: LaunchedRank, host: str, hosts: Sequence[int]) -> dict[str, str]:
        heir = self._heirs[host]
        facts = HostFacts("", heir.address, heir.ports, heir.cores, self._handover.launcher)
        told = RankVariables.of(self._settings)
        return late_environment(Placement(rank, tuple(hosts)), facts, *self._handover.master, told)

    def call_late(self, host: str) -> None:
        raise ValueError("the launcher that could call hosts is lost")

    def take_in(self, member: Agent, slots: int) -> tuple[str, ...]:
        return ("the launcher that could take in hosts is lost",)

    def handover(self, hosts: Sequence[tuple[str, int]], places: int, most: int, directory: Path) -> Handover:
        there = {member.place.index for member in self.agents.members if not member.over}
        heirs = tuple(
            replace(heir, endpoint="") if heir.host == self.host else heir  # this process has taken the port there
            for heir in self._handover.heirs
            if heir.agent in there
        )
        return _replaced(self._handover, heirs, tuple(hosts))

    host = ""  # of this process


def _replaced(handover: Handover, heirs: tuple[Heir, ...], hosts: tuple[tuple[str, int], ...]) -> Handover:
    return Handover(
        heirs,
        handover.client_public,
        handover.client_secret,
        handover.variables,
        hosts,
        handover.places,
        handover.most,
        handover.launcher,
        handover.master,
        handover.directory,
    )


def main(arguments: Sequence[str]) -> int:
    """Run a successor to the end of the job. ``arguments``: the numbers of two files, the task and a listening socket."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    task = task_in(int(arguments[0]))
    listener = socket.socket(fileno=int(arguments[1]))
    files = _Files(Path(task.handover.directory))
    code, name = 1, "exit_code"
    try:
        one = _Successor(task, listener, files.write)
        code = one.run()
        if one.has_no_quorum:  # the job may go on elsewhere, and this directory may be shared
            name = f"exit_code.{one.host}"
    finally:  # whoever waits for this file must find it also if this process fails; the log has the traceback then
        files.end(name, code)
    return 0


class _Files:
    """The files of a successor, which also get what this process itself writes: errors of Python, for example.

    They are in a directory that ``ddl run`` has named. If it is full, or cannot be written on this host, they go on in a new
    one among temporary files, because no one could do anything about it before the job has ended.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._has_moved = False
        self._log = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._move(error)

    def write(self, data: bytes) -> None:
        """Add ``data`` to the output."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._log, view) :]
            except OSError as error:
                if self._has_moved:
                    raise
                self._move(error)

    def end(self, name: str, code: int) -> None:
        """Write the exit code of the job to the file ``name``, which has it as soon as it exists. Close the output."""
        part = self._directory / f".{name}.{os.getpid()}"
        try:
            part.write_text(f"{code}\n")
            part.replace(part.with_name(name))
        except OSError as error:
            if self._has_moved:
                raise
            part.unlink(missing_ok=True)
            self._move(error)
            self.end(name, code)
            return
        os.close(self._log)

    def _move(self, error: OSError) -> None:
        before, self._directory = self._directory, Path(tempfile.mkdtemp(prefix="ddl-continued-"))
        self._has_moved = True
        self._open()
        self.write(f"ddl run: {before}: {error.strerror}; the output is here instead\n".encode())

    def _open(self) -> None:
        log = os.open(self._directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if self._log >= 0:
            os.close(self._log)
        self._log = log
        os.dup2(log, 1)
        os.dup2(log, 2)


class _Successor:
    """One successor, from the adoption of the agents to the end of the job."""

    def __init__(self, task: SuccessorTask, listener: socket.socket, write: Callable[[bytes], None]) -> None:
        handover = self._handover = task.handover
        self._task = task
        self._settings, self._registry = settings_of(os.environ, warns=False)
        log_at(self._settings.text("log_level"))
        names = [name for name, _ in handover.hosts]
        self.host = next(heir.host for heir in handover.heirs if heir.agent == task.agent)
        self._here = names.index(self.host)
        screen = self._screen = Screen(write, is_terminal=False, colour=False)
        self._output = Output((screen, screen), handover.places)
        self._begun_s = time.monotonic()
        number = 1 + task.agent
        membership = build_membership(
            (), self._settings, handover.places, handover.most, Quorum(), Coordinating(number, self._here)
        )
        assert membership is not None
        self._membership: ElasticMembership = membership
        sessions = build_sessions(
            handover.places, self._settings, self._registry, membership=membership, term=f"{number}."
        )
        hosts = {heir.agent: heir.host for heir in handover.heirs}
        places = [AgentPlace(index, hosts.get(index, ""), ()) for index in range(1 + max(hosts))]
        self._agents = OrphanedAgents(places, self._say, self._membership.unheard)
        self._hosts: HostTable | None = None  # of the agents that have come
        self._history = History(self._say, self._host_of)
        opened = partial(tell_of_world, self._agents, self._membership, self._history)
        self._failure_log = ObservedCoordinator(sessions, sessions.dead, history=self._history, opened=opened)
        keys = KeyPair(task.server_public, task.server_secret)
        self._server = Server(
            handover.places,
            self._failure_log,
            report=self._say,
            agents=self._agents,
            silence_s=self._settings.number("silence_s"),
            prepared=PreparedListener(listener, keys, handover.client_public),
        )

    def _host_of(self, rank: LaunchedRank) -> str:
        return "" if self._hosts is None else self._hosts.name_of(rank)

    def _say(self, text: str) -> None:
        self._output.say(f"ddl run: {text}")

    @property
    def has_no_quorum(self) -> bool:
        """Whether the job has ended here because another part of it may go on."""
        return self._membership.has_no_quorum

    def run(self) -> int:
        """Coordinate the job to its end, and return its exit code."""
        self._output.start()
        self._say(f"{self._task.reason}: this process on {self.host} takes the place of the launcher")
        try:
            adopted = self._agents.adopt(self._server, self._task.expected, _GATHER_S, self._output)
            worlds = [world for member in adopted if member.adopted for world in member.adopted.worlds]
            if not worlds:
                self._say("no agent has come that knows of a world of this job")
                return 1
            return self._supervise(adopted, worlds)
        finally:
            self._agents.close()
            self._server.close()
            self._output.drain()

    def _supervise(self, adopted: Sequence[Agent], worlds: Sequence[Opened]) -> int:
        newest = max(worlds, key=lambda world: (world.ballot, world.seconds_lost))  # the copy with the latest totals
        told = [member.adopted for member in adopted if member.adopted is not None]
        for member in adopted:
            log.debug("agent on %s: %s", member.place.host, member.adopted)
        running = {
            process: self._index_of(member)
            for member in adopted
            if member.adopted is not None
            for process, _ in member.adopted.running
        }
        ended = {process: code for one in told for process, code in one.ended}
        self._failure_log.stopped = max(world.stopped for world in worlds if world.ballot == newest.ballot)
        table = self._hosts = self._table(adopted, newest, running, ended)
        remote = _Adopted(self._agents, self._handover, self._settings)
        remote.host = self.host
        revival = revival_of(table, self._membership, self._settings)
        starts: dict[LaunchedRank, StartNumber] = {}
        for place, start in (*(process for world in worlds for process in world.processes), *running, *ended):
            starts[place] = max(start, starts.get(place, start))
        hand_over = HandingOver(remote, self._handover.most, Path(self._handover.directory))
        parts = (self._server, remote, self._say, hand_over)
        growth = Growth(table, revival, _starts_nothing, *parts, starts=starts)
        watches = Watches(self._settings)  # nothing observes the job from here
        job = RunningJob(
            (),
            self._settings,
            self._server,
            self._failure_log,
            self._say,
            self._agents,
            growth,
            watches,
        )
        self._history.goes_on(newest, [place for place, _ in running])
        self._take_over(worlds, running, ended)
        hand_over(table)  # before anything else can happen to this process
        ends = job.run(growth.host_name) or [
            End(place, code, self._begun_s)
            for (place, start), code in ended.items()
            if (place, start) in newest.processes
        ]
        self._agents.release()
        self._agents.finish(lambda: False)
        self._output.drain()  # before the last lines of a failed rank are asked for
        return self._conclude(ends, job.supervisor, growth)

    def _take_over(self, worlds: Sequence[Opened], running: Mapping[Process, int], ended: Collection[Process]) -> None:
        """Have the server's thread take over the members, and wait for it: before, nothing that happens can be judged."""
        done = threading.Event()

        def adopt() -> Outgoing[LaunchedRank]:
            try:
                return self._failure_log.noted(self._membership.adopt(worlds, running, ended))
            finally:
                done.set()

        self._server.do(adopt)
        done.wait(_GATHER_S)

    def _table(
        self, adopted: Sequence[Agent], newest: Opened, running: Mapping[Process, int], ended: Mapping[Process, int]
    ) -> HostTable:
        """Return the host table with the hosts of ``adopted``; processes are ``running`` at their places."""
        there = {member.place.host for member in adopted}
        hosts = [HostSlots(name, slots if name in there else 0) for name, slots in self._handover.hosts]
        at = {place: host for (place, _), host in running.items()}
        done = {process[0] for process, code in ended.items() if code == 0 and process in newest.processes}
        count = 1 + max(place for place, host in enumerate(newest.hosts) if host >= 0 or place in at)
        assigned = [at.get(LaunchedRank(place), newest.hosts[place]) for place in range(count)]
        cooldown_s = cooldown_range(self._settings.text("host_cooldown_s"))
        table = HostTable(hosts, assigned, self._handover.places, self._handover.most, cooldown_s)
        for host in table.hosts:
            host.reached = any(host.name == member.place.host for member in adopted if not member.gone)
        for place in map(LaunchedRank, range(count)):
            if place not in at:
                table.ended(place, place in done)
        return table

    def _index_of(self, member: Agent) -> int:
        return [name for name, _ in self._handover.hosts].index(member.place.host)

    def _conclude(self, ends: Sequence[End], supervisor: Supervisor, growth: Growth) -> int:
        """Say how the job has ended, and return its exit code."""
        observed = self._failure_log
        history = self._history.summary()
        first = first_failure(ends, observed.raised)
        if history:
            self._screen.say(history)
        if first is not None:
            lines, after_s = self._output.last_lines(first.rank), first.at_s - self._begun_s
            wrote = self._output.wrote(first.rank)
            self._screen.say(summary(ends, first, growth.host_name(first.rank), lines, after_s, wrote))
        elif observed.differ:
            self._screen.say(observed.differ)
        return observed.exit_code(ends, supervisor.killed) or int(not ends)


def _starts_nothing(rank: LaunchedRank, hosts: Sequence[int]) -> Watched:
    raise OSError("a successor starts processes by agents only")
