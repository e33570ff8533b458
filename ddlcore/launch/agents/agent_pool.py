"""Manage the agents of one job for the launcher: start the agents, send messages to them, and handle their messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from ddlcore.contracts.launcher import AgentPlace, Launcher, StartCommand
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.launch.agents.agent_ranks import AgentRanks
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.commands import AgentCommands
from ddlcore.launch.agents.started import Started
from ddlcore.launch.agents.streams import RankStreams
from ddlcore.launch.agents.wire import (
    Ack,
    Adopt,
    AgentFinished,
    Begin,
    Begun,
    Credit,
    Data,
    Ended,
    Handover,
    Here,
    Leaves,
    Look,
    Quit,
    Release,
    Report,
    Said,
    ToAgent,
    decode_from_agent,
    encode,
)
from ddlcore.launch.ranks.supervisor import LOST
from ddlcore.messages.elastic import Opened
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.to_rank import Outgoing

_SLICE_S = 0.1
_CLEARED_S = 4.0  # time from the end of an agent's ranks to its AgentFinished: processes that ranks left behind get 2 s

Unheard = Callable[[Collection[LaunchedRank], bool], Outgoing[LaunchedRank]]


class AgentPool:
    """All agents of a job.

    The control server's thread calls ``heard`` and ``silent``. The main thread calls the other methods, unless a method
    says that any thread may call it.
    """

    def __init__(
        self,
        places: Sequence[AgentPlace],
        launcher: Launcher,
        say: Callable[[str], None],
        unheard: Unheard | None = None,
    ) -> None:
        """Begin with one agent at each of ``places``, which has not been started yet.

        ``launcher`` starts agents, and ``say`` shows a line to the user. ``unheard`` is called in the server's thread with
        the ranks of a lost host, before the end of each of them is told, and whether they have certainly died.
        """
        self.members = [Agent(place, self._credit(place)) for place in places]
        self._launcher = launcher
        self._say = say
        self._unheard = unheard
        self._commands: AgentCommands | None = None  # that have started the agents
        self._changed = threading.Condition()
        self._server: Server | None = None
        self._look: Look | None = None
        self._function = b""  # that the ranks call; b"": they run a command
        self._newest: Opened | None = None  # the last world of which agents were told
        self.streams = RankStreams(say, lambda agent, nbytes: self._tell(agent, Ack(nbytes)))
        self.ranks = AgentRanks(self.members, self._tell, self.streams)
        # Called when an agent that was called late has reported, and when any agent is lost; in any thread.
        self.changed: Callable[[Agent], None] = lambda member: None
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
        for command in commands:
            self._start(command)

    def call_late(self, place: AgentPlace, command: StartCommand) -> None:
        """Run ``command``, which starts one more agent while ranks are already running. ``place`` describes the agent.

        Call this in the main thread, after ``call``. The function in the attribute ``changed`` is called when the agent
        has sent its report or is lost. Raises OSError if the command cannot be run.
        """
        assert place.index == len(self.members)
        self.members.append(Agent(place, self._credit(place), late=True))
        self._start(command)

    def begin_late(self, member: Agent, begin: Begin) -> None:
        """Send ``begin``, the data for starting ranks, to ``member``, an agent that ``call_late`` has started.

        The agent starts no rank before ``ranks.again`` is called.
        """
        if self._function:
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
            member.credit.send(-1, "task", data)

    def begin(self, begins: Sequence[Begin], timeout_s: float, interrupted: Callable[[], object]) -> list[str]:
        """Tell every agent to start its ranks, and wait until all agents have done so.

        Return one line of text for each agent that has not started its ranks. An agent that was lost after it had started
        them is none of these: its ranks are lost, which ``ranks.attach`` reports. ``begins`` has the message for each agent, in
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

    def release(self) -> None:
        """Tell the agents that no rank will be started again, so that each agent ends when its ranks have ended."""
        for member in self.members:
            if not member.over and (member.begun is not None or not member.late):
                self._tell(member.place.index, Release())
            elif not member.over:
                self.dismiss(member)

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
            self.ranks.heard_end(member, message)
        elif isinstance(message, Leaves):
            if not member.gone:
                member.wants_to_leave = True
                self.leaves(member)
        elif isinstance(message, Ack):
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

    def _note(self, agent: int, member: Agent, message: Here | Report | Begun | AgentFinished) -> None:
        if member.gone and not isinstance(message, AgentFinished):
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
                self.ranks.ended(rank, LOST, f"it could not be started: {message.error}")

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
        self._lose_ranks(member.ranks, certain)
        member.credit.close()
        self.changed(member)
        for rank in list(member.ranks):
            self.ranks.ended(rank, LOST, f"its host {member.place.host} is gone ({reason})", certain)

    def _lose_ranks(self, ranks: Sequence[LaunchedRank], certain: bool) -> None:
        if self._server is not None and self._unheard is not None:
            self._server.do(partial(self._unheard, tuple(ranks), certain))

    def _disown(self, member: Agent) -> None:
        """Have the agent ``member`` end its ranks, if it lives. They count as lost, so they are not heard any more."""
        if self._server is not None:
            self._server.give_up(member.place.index)
            self._tell(member.place.index, Quit())

    def _credit(self, place: AgentPlace) -> Credit:
        return Credit(partial(self._send, place.index))

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
