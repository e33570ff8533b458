"""Manage the agents of one job for the launcher: start the agents, send messages to them, and handle their messages."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from ddlcore.contracts.launcher import AgentPlace, Launcher, StartCommand
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.launch.agents.commands import AgentCommands
from ddlcore.launch.agents.remote_rank import RemoteRank
from ddlcore.launch.agents.started import Started
from ddlcore.launch.agents.streams import RankStreams
from ddlcore.launch.agents.wire import (
    Ack,
    Adopt,
    Again,
    Begin,
    Begun,
    Credit,
    Data,
    Ended,
    Finished,
    Handover,
    Here,
    Leaves,
    Look,
    Quit,
    RankTask,
    Release,
    Report,
    Said,
    ToAgent,
    decode_from_agent,
    encode,
)
from ddlcore.launch.output.output import Output
from ddlcore.launch.ranks.supervisor import LOST, Supervisor
from ddlcore.messages.elastic import Opened

_SLICE_S = 0.1
_CLEARED_S = 4.0  # time from the end of an agent's ranks to its Finished: processes that ranks left behind get 2 s


@dataclass
class Agent:
    """The state of one agent, as the launcher knows it from the agent's messages."""

    place: AgentPlace
    ranks: list[int]  # ranks that the agent runs or has run; grows if ranks are started there later
    late: bool = False  # the agent was started while ranks were already running
    here: bool = False  # the first message, Here, has arrived
    report: Report | None = None
    begun: Begun | None = None
    finished: bool = False  # Finished has arrived, or the launcher has sent Quit
    gone: str = ""  # why the agent is lost and sends no more messages; "": it is not lost
    credit: Credit | None = None
    served: set[int] = field(default_factory=set)  # all ranks that it has ever run

    adopted: Adopt | None = None  # what it has told this successor of its launcher
    wants_to_leave: bool = False  # its host is to leave the job

    def __post_init__(self) -> None:
        self.served.update(self.ranks)

    @property
    def over(self) -> bool:
        return self.finished or bool(self.gone)


class AgentPool:
    """All agents of a job.

    The control server's thread calls ``heard`` and ``silent``. The main thread calls the other methods, unless a method
    says that any thread may call it.
    """

    def __init__(self, places: Sequence[AgentPlace], launcher: Launcher, say: Callable[[str], None]) -> None:
        self.members = [Agent(place, list(place.ranks)) for place in places]
        self._launcher = launcher
        self._say = say
        self._commands: AgentCommands | None = None  # that have started the agents
        self._changed = threading.Condition()
        self._supervisor: Supervisor | None = None
        self._server: Server | None = None
        self._look: Look | None = None
        self._function = b""  # that the ranks call; b"": they run a command
        self._starts: dict[int, int] = {}  # by rank: how many processes ran there before the present one, if not 0
        self._newest: Opened | None = None  # the last world of which agents were told
        self._early: list[tuple[int, int, str, bool]] = []  # ends of ranks that arrived before there was a supervisor
        self.streams = RankStreams(say, lambda agent, nbytes: self._tell(agent, Ack(nbytes)))
        # Called when an agent that was called late has reported, and when any agent is lost; in any thread.
        self.changed: Callable[[Agent], None] = lambda member: None
        # Called with the ranks of a lost host before the end of each of them is told, and whether they have certainly died.
        self.unheard: Callable[[Sequence[int], bool], None] = lambda ranks, certain: None
        self.leaves: Callable[[Agent], None] = lambda member: None  # called when the host of an agent leaves the job

    # --- the beginning

    def call(
        self,
        commands: Sequence[StartCommand],
        server: Server,
        endpoint_of: Callable[[str], str],
        environ: Mapping[str, str],
        silence_s: float,
        look: Look,
    ) -> None:
        """Run ``commands``, which start the agents. Call this in the main thread.

        ``look`` is the request to an agent to report on its host. ``server`` sends it to each agent after the agent's
        first message has arrived. ``endpoint_of(host)`` returns the endpoint at which an agent on that host reaches
        ``server``. ``environ`` is the environment of the commands. An agent ends if it gets no message from the
        launcher for ``silence_s`` seconds. Raises OSError if a command cannot be run.
        """
        self._server, self._look = server, look
        self._commands = AgentCommands(
            self._launcher, environ, silence_s, lambda host: server.agent_access(endpoint_of(host)), server.admit
        )
        for member in self.members:
            member.credit = Credit(partial(self._send, member.place.index))
        for command in commands:
            self._start(command)

    def call_late(self, place: AgentPlace, command: StartCommand) -> None:
        """Run ``command``, which starts one more agent while ranks are already running. ``place`` describes the agent.

        Call this in the main thread, after ``call``. The function in the attribute ``changed`` is called when the agent
        has sent its report or is lost. Raises OSError if the command cannot be run.
        """
        assert place.index == len(self.members)
        self.members.append(Agent(place, [], late=True, credit=Credit(partial(self._send, place.index))))
        self._start(command)

    def begin_late(self, member: Agent, begin: Begin) -> None:
        """Send ``begin``, the data for starting ranks, to ``member``, an agent that ``call_late`` has started.

        The agent starts no rank before ``again`` is called.
        """
        if self._function:
            assert member.credit is not None
            member.credit.send(-1, "task", self._function)
        self._tell(member.place.index, begin)

    def dismiss(self, member: Agent) -> None:
        """Tell the agent ``member``, which runs no ranks, to end."""
        with self._changed:
            member.finished = True
        self._tell(member.place.index, Quit())

    def lose(self, host: str, reason: str) -> None:
        """Give up the agent of ``host`` for ``reason``. Any thread may call this."""
        for member in list(self.members):
            if member.place.host == host:
                self._lose(member, reason)

    def forget(self, rank: int) -> None:
        """Record that no agent runs ``rank`` any more."""
        for member in self.members:
            if rank in member.ranks:
                member.ranks.remove(rank)

    def _start(self, command: StartCommand) -> None:
        assert self._commands is not None
        hosts = {self.members[index].place.host for index in command.agents}
        self._commands.start(command, min(hosts), self._command_ended)

    def gather(self, timeout_s: float, interrupted: Callable[[], object]) -> bool:
        """Wait until every agent has sent its report or is known to be lost, and return True.

        An agent that has not sent its report after ``timeout_s`` seconds counts as lost. Return False if
        ``interrupted()`` becomes true during the wait.
        """
        deadline_s = time.monotonic() + timeout_s
        done = self._wait(lambda m: m.report is not None or bool(m.gone), deadline_s, interrupted)
        if not done and not interrupted():
            for member in self.members:
                if member.report is None and not member.gone:
                    assert self._commands is not None
                    started = self._commands.of(member.place.index)
                    self._lose(member, self._commands.explain(started, member.place.host, member.here, None))
        return done or not interrupted()

    def send_task(self, data: bytes) -> None:
        """Send ``data``, the pickled function for the ranks, to every agent.

        Agents that are started later also get it, in ``begin_late``.
        """
        self._function = data
        for member in self.members:
            assert member.credit is not None
            member.credit.send(-1, "task", data)

    def begin(self, begins: Sequence[Begin], timeout_s: float, interrupted: Callable[[], object]) -> list[str]:
        """Tell every agent to start its ranks, and wait until all agents have done so.

        Return one line of text for each agent that has not started its ranks. An agent that was lost after it had started
        them is none of these: its ranks are lost, which ``attach`` reports. ``begins`` has the message for each agent, in
        the order of ``members``. The wait ends after ``timeout_s`` seconds, or earlier if ``interrupted()`` becomes true.
        """
        for member, begin in zip(self.members, begins):
            self._tell(member.place.index, begin)
        self._wait(lambda m: m.begun is not None or bool(m.gone), time.monotonic() + timeout_s, interrupted)
        problems = []
        for member in self.members:
            if member.begun is None:
                problems.append(f"{member.place.host}: {member.gone or 'its agent does not answer any more'}")
            elif member.begun.error:
                problems.append(f"{member.place.host}: the ranks cannot be started: {member.begun.error}")
        return problems

    def hand_over(self, handover: Handover) -> None:
        """Tell all agents what a successor of this launcher needs. Any thread may call this."""
        for member in self.members:
            if not member.over and member.begun is not None:
                self._tell(member.place.index, handover)

    def tell_of_world(self, world: Opened) -> None:
        """Tell all agents that ``world`` opens. Call it in the server's thread, before the ranks are told.

        Agents that come later are told of it when they come.
        """
        self._newest = world
        data = encode(world)  # once: it names every member
        for member in self.members:
            if not member.over and member.here:
                self._send(member.place.index, data)

    # --- while ranks run

    def ranks(self) -> list[RemoteRank]:
        """Return one RemoteRank for each rank that agents run. A supervisor watches the ranks by these objects."""
        return [
            RemoteRank(rank, partial(self._tell, member.place.index))
            for member in self.members
            for rank in member.ranks
        ]

    def again(self, host: str, rank: int, environ: Mapping[str, str], start: int = 0) -> RemoteRank:
        """Start another process of ``rank``, whose process has ended, and return what a supervisor can watch.

        ``environ`` are the variables that only this rank gets, and ``start`` is the number of processes that it had before.
        Raises OSError if no agent serves ``host``. If the agent is lost meanwhile, the supervisor learns that the rank is
        lost.
        """
        member = next((member for member in self.members if member.place.host == host and not member.over), None)
        if member is None:
            raise OSError(errno.EHOSTDOWN, "its host is gone", host)
        self.forget(rank)  # it may have run on a host that was lost
        member.ranks.append(rank)
        member.served.add(rank)
        self._starts[rank] = start
        assert self.streams.output is not None
        self.streams.output.add_fed_later(rank)
        self._tell(member.place.index, Again(RankTask(rank, dict(environ), start)))
        return RemoteRank(rank, partial(self._tell, member.place.index))

    def release(self) -> None:
        """Tell the agents that no rank will be started again, so that each agent ends when its ranks have ended."""
        for member in self.members:
            if not member.over and (member.begun is not None or not member.late):
                self._tell(member.place.index, Release())
            elif not member.over:
                self.dismiss(member)

    def join(self, output: Output) -> None:
        """Register the ranks of all agents with ``output``, which will show the lines that these ranks write.

        Call this before ``output.start`` and before ``begin``.
        """
        for member in self.members:
            for rank in member.ranks:
                output.add_fed(rank)
        self.streams.output = output

    def attach(self, supervisor: Supervisor) -> None:
        """Report the end of each rank to ``supervisor`` from now on.

        Ends that arrived before this call are reported at once.
        """
        # An agent's rank may end before the launcher has built its supervisor: Begun and Ended can arrive together, in
        # the server's thread. The lock makes sure that each end is either added to `_early` or reported to the
        # supervisor: no end is lost and no end is reported twice. The supervisor is called without the lock, because it
        # protects its own queues.
        with self._changed:
            self._supervisor = supervisor
            early, self._early = self._early, []
        for rank, returncode, lost, certain in early:
            supervisor.ended_on_host(rank, returncode, lost, certain)

    def results(self) -> dict[int, bytes]:
        """Return the pickled results of the function, by rank. Ranks that have sent no result are missing."""
        found = [
            (rank, self.streams.result(member.place.index, rank)) for member in self.members for rank in member.ranks
        ]
        return {rank: result for rank, result in found if result is not None}

    # --- the end

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Wait until every agent has sent its last message or is lost. Call this after all ranks have ended.

        Stop waiting if no output has arrived for 4 seconds, unless a slow screen has not yet shown all received output.
        Stop waiting at once if ``give_up()`` becomes true.
        """
        before = self.streams.arrived
        while not self._wait(lambda m: m.over, time.monotonic() + _CLEARED_S, give_up):
            if give_up() or (not self.streams.is_feeding and self.streams.arrived == before):
                return
            before = self.streams.arrived

    def close(self) -> None:
        """Tell every agent to kill its ranks and to end, and then end the commands that started the agents."""
        for member in self.members:
            if member.credit is not None:
                member.credit.close()
            if member.here:
                self._tell(member.place.index, Quit())
        if self._commands is not None:
            self._commands.close({member.place.index for member in self.members if member.here})

    # --- in the server's thread

    def heard(self, agent: int, data: bytes) -> None:
        """Handle ``data``, one message of agent number ``agent``. This implements ``control.server.Agents.heard``."""
        if agent >= len(self.members):
            return
        member = self.members[agent]
        try:
            message = decode_from_agent(data)
        except DdlInternalError as error:
            self._lose(member, str(error))
            return
        if isinstance(message, Data):
            self.streams.take(agent, message, member.served)
        elif isinstance(message, Ended):
            # An agent that was lost may come back, but its ranks were given up: others may run at their places now.
            is_present = message.rank in member.ranks and message.start >= self._starts.get(message.rank, 0)
            if not member.gone and is_present:
                self._end(message.rank, message.returncode, message.lost)
        elif isinstance(message, Leaves):
            if not member.gone:
                member.wants_to_leave = True
                self.leaves(member)
        elif isinstance(message, Ack):
            assert member.credit is not None
            member.credit.give(message.nbytes)
        elif isinstance(message, Said):
            self._say(f"{member.place.host}: {message.text}")
        elif isinstance(message, Adopt):
            self._take_over(agent, member, message)
        else:
            self._note(agent, member, message)

    def silent(self, agent: int, silence_s: float) -> None:
        """Treat agent number ``agent`` as lost, because no message from it has arrived for ``silence_s`` seconds.

        This implements ``control.server.Agents.silent``.
        """
        if agent >= len(self.members):
            return
        self._lose(self.members[agent], f"no message from it for {silence_s:g} s")

    def _note(self, agent: int, member: Agent, message: Here | Report | Begun | Finished) -> None:
        if member.gone and not isinstance(message, Finished):
            self._disown(member)  # it was given up before it could be told
            return
        with self._changed:
            if isinstance(message, Here):
                member.here = True
                if self._newest is not None:  # its ranks may not be in it, but may be in the next one
                    self._tell(agent, self._newest)
                assert self._look is not None
                meets = 0 in member.ranks  # MASTER_PORT must be free on rank 0's host only
                self._tell(agent, self._look if meets else replace(self._look, port=0))
            elif isinstance(message, Report):
                member.report = message
            elif isinstance(message, Begun):
                member.begun = message
            else:
                member.finished = True
                assert self._server is not None
                self._server.dismiss(agent)
            self._changed.notify_all()
        if isinstance(message, Report) and member.late:
            self.changed(member)
        if isinstance(message, Begun) and message.error:  # otherwise a supervisor would wait forever for their ends
            for rank in list(member.ranks):
                self._end(rank, LOST, f"it could not be started: {message.error}")

    def _take_over(self, _agent: int, member: Agent, _message: Adopt) -> None:
        """Handle the message of an agent that has lost its launcher. It is not this one, so the agent has to end."""
        self._disown(member)

    # --- in any thread

    def _command_ended(self, started: Started, code: int) -> None:
        for index in started.command.agents:
            member = self.members[index]
            if member.begun is not None and started.command.task == "public":
                continue  # such a command may end before its agent; if the agent has ended, too, it is silent
            if not member.over:
                certain = len(started.command.agents) == 1 and self._launcher.proves_end(code)
                assert self._commands is not None
                why = self._commands.explain(started, member.place.host, member.here, code)
                self._lose(member, why, certain)

    def _lose(self, member: Agent, reason: str, certain: bool = False) -> None:
        with self._changed:
            if member.over:
                return
            member.gone = reason
            self._changed.notify_all()
        self._disown(member)
        self.unheard(tuple(member.ranks), certain)
        if member.credit is not None:
            member.credit.close()
        self.changed(member)
        for rank in list(member.ranks):
            self._end(rank, LOST, f"its host {member.place.host} is gone ({reason})", certain)

    def _disown(self, member: Agent) -> None:
        """Have the agent ``member`` end its ranks, if it lives. They count as lost, so they are not heard any more."""
        if self._server is not None:
            self._server.give_up(member.place.index)
            self._tell(member.place.index, Quit())

    def _end(self, rank: int, returncode: int, lost: str, certain: bool = True) -> None:
        with self._changed:
            if self._supervisor is None:
                self._early.append((rank, returncode, lost, certain))
                return
        self._supervisor.ended_on_host(rank, returncode, lost, certain)

    def _tell(self, agent: int, message: ToAgent) -> None:
        self._send(agent, encode(message))

    def _send(self, agent: int, data: bytes) -> None:
        assert self._server is not None
        self._server.tell(agent, data)

    def _wait(
        self,
        condition: Callable[[Agent], bool],
        deadline_s: float,
        give_up: Callable[[], object],
    ) -> bool:
        with self._changed:
            while not all(condition(member) for member in self.members):
                if give_up() or time.monotonic() >= deadline_s:
                    return False
                self._changed.wait(_SLICE_S)
        return True
