"""Manage the agents of one job for the launcher: start the agents, send messages to them, and handle their messages."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ddlcore.contracts.launcher import AgentPlace, Launcher, StartCommand
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.launch.agents.bootstrap import AgentTask, task_text
from ddlcore.launch.agents.started import Started
from ddlcore.launch.agents.wire import (
    Ack,
    Adopt,
    Adopted,
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
    Signal,
    ToAgent,
    decode_from_agent,
    encode,
)
from ddlcore.launch.output.output import Output
from ddlcore.launch.ranks.supervisor import LOST, Supervisor
from ddlcore.messages.elastic import Opened
from ddlcore.observe.timeline import part_of

_SLICE_S = 0.1
_PART = re.compile(r"timeline(\.[1-9][0-9]{0,5})?")
_CLEARED_S = 4.0  # time from the end of an agent's ranks to its Finished: processes that ranks left behind get 2 s
_LET_GO_S = 2.0  # time from Quit to the end of the command that started the agent
_GIVEN_UP = "the launcher had given it up"


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
    results: dict[int, bytearray] = field(default_factory=dict)  # by rank: the part of the pickled result so far
    credit: Credit | None = None
    served: set[int] = field(default_factory=set)  # all ranks that it has ever run
    parts: dict[tuple[int, str], Path] = field(default_factory=dict)  # of a timeline, by rank and stream

    adopted: Adopt | None = None  # what it has told this successor of its launcher
    wants_to_leave: bool = False  # its host is to leave the job

    def __post_init__(self) -> None:
        self.served.update(self.ranks)

    @property
    def over(self) -> bool:
        return self.finished or bool(self.gone)


class RemoteRank:
    """A rank that an agent has started. A supervisor can watch it like a local rank: it implements ``Watched``."""

    process = None

    def __init__(self, rank: int, tell: Callable[[ToAgent], None]) -> None:
        self.rank = rank
        self._tell = tell

    def signal(self, number: int) -> None:
        """Tell the agent to send signal ``number`` only to the rank's own process."""
        self._tell(Signal(self.rank, number, False))

    def signal_group(self, number: int) -> None:
        """Tell the agent to send signal ``number`` to the rank's process and to all processes started by the rank."""
        self._tell(Signal(self.rank, number, True))

    def leaves_group(self) -> bool:
        """Return False, because the supervisor does not end the processes that the rank has left behind.

        The agent ends these processes, and sends Finished when they have ended.
        """
        return False


class AgentPool:
    """All agents of a job.

    The control server's thread calls ``heard`` and ``silent``. The main thread calls the other methods, unless a method
    says that any thread may call it.
    """

    def __init__(self, places: Sequence[AgentPlace], launcher: Launcher, say: Callable[[str], None]) -> None:
        self.members = [Agent(place, list(place.ranks)) for place in places]
        self._launcher = launcher
        self._say = say
        self._started: list[Started] = []
        self._changed = threading.Condition()
        self._supervisor: Supervisor | None = None
        self._output: Output | None = None
        self._server: Server | None = None
        self._look: Look | None = None
        self._endpoint_of: Callable[[str], str] = str
        self._environ: Mapping[str, str] = {}
        self._silence_s = 0.0
        self._function = b""  # that the ranks call; b"": they run a command
        self._adopts = False  # this pool belongs to a successor of the launcher, which waits for the agents
        self._starts: dict[int, int] = {}  # by rank: how many processes ran there before the present one, if not 0
        self._newest: Opened | None = None  # the last world of which agents were told
        self._early: list[tuple[int, int, str, bool]] = []  # ends of ranks that arrived before there was a supervisor
        self._feeding = 0  # pieces of output that are not yet shown
        self._arrived = 0  # bytes of streams received so far
        # Called when an agent that was called late has reported, and when any agent is lost; in any thread.
        self.changed: Callable[[Agent], None] = lambda member: None
        # Called with the ranks of a lost host before the end of each of them is told, and whether they have certainly died.
        self.unheard: Callable[[Sequence[int], bool], None] = lambda ranks, certain: None
        self.leaves: Callable[[Agent], None] = lambda member: None  # called when the host of an agent leaves the job
        self.timeline_dir: Path | None = None  # where the ranks' parts of a timeline are written

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
        self._endpoint_of, self._environ, self._silence_s = endpoint_of, environ, silence_s
        for member in self.members:
            member.credit = Credit(self._sender(member.place.index))
        for command in commands:
            self._start(command)

    def call_late(self, place: AgentPlace, command: StartCommand) -> None:
        """Run ``command``, which starts one more agent while ranks are already running. ``place`` describes the agent.

        Call this in the main thread, after ``call``. The function in the attribute ``changed`` is called when the agent
        has sent its report or is lost. Raises OSError if the command cannot be run.
        """
        assert place.index == len(self.members)
        self.members.append(Agent(place, [], late=True, credit=Credit(self._sender(place.index))))
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
        assert self._server is not None
        hosts = {self.members[index].place.host for index in command.agents}
        access = self._server.agent_access(self._endpoint_of(min(hosts)))
        task = task_text(AgentTask(access, self._silence_s, command.agents, command.number))
        ended, answered = self._command_ended, self._server.admit
        self._started.append(Started(command, task, self._environ, ended=ended, answered=answered))

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
                    started = next(s for s in self._started if member.place.index in s.command.agents)
                    self._lose(member, self._explain(member, started, None))
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

    def adopt(self, server: Server, expected: Collection[int], timeout_s: float, output: Output) -> list[Agent]:
        """Wait until the agents with the numbers ``expected`` have come to ``server``, and return all that have come.

        This is for the pool of a successor of the launcher, instead of ``call`` and ``begin``. Waits at most ``timeout_s``
        seconds. Agents that have not come by then count as lost, and are told to end if they come later. ``output`` shows
        what ranks write.
        """
        self._server, self._output = server, output
        for member in self.members:
            member.credit = Credit(self._sender(member.place.index))
        with self._changed:
            self._adopts = True
            for member in self.members:
                if not member.place.host:  # others may run at the places of its ranks
                    member.gone = _GIVEN_UP
        server.start()

        def is_decided(member: Agent) -> bool:
            return member.adopted is not None or bool(member.gone) or member.place.index not in expected

        self._wait(is_decided, time.monotonic() + timeout_s, lambda: False)
        with self._changed:
            self._adopts = False
            for member in self.members:
                if member.adopted is None and not member.gone:
                    late = f"its agent has not come within {timeout_s:g} s"
                    member.gone = late if member.place.index in expected else "its host does not answer"
        return [member for member in self.members if member.adopted is not None]

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
        assert self._server is not None
        data = encode(world)  # once: it names every member
        for member in self.members:
            if not member.over and member.here:
                self._server.tell(member.place.index, data)

    # --- while ranks run

    def ranks(self) -> list[RemoteRank]:
        """Return one RemoteRank for each rank that agents run. A supervisor watches the ranks by these objects."""
        return [RemoteRank(rank, self._teller(member.place.index)) for member in self.members for rank in member.ranks]

    def serves(self, rank: int) -> bool:
        """Return whether the agent that runs ``rank`` can start another process of it. Any thread may call this."""
        return any(rank in member.ranks and not member.over for member in self.members)

    def again(self, host: str, rank: int, environ: Mapping[str, str], output: Output, start: int = 0) -> RemoteRank:
        """Start another process of ``rank``, whose process has ended, and return what a supervisor can watch.

        ``environ`` are the variables that only this rank gets, ``output`` takes its lines, and ``start`` is the number of
        processes that it had before. Raises OSError if no
        agent serves ``host``. If the agent is lost meanwhile, the supervisor learns that the rank is lost.
        """
        member = next((member for member in self.members if member.place.host == host and not member.over), None)
        if member is None:
            raise OSError(errno.EHOSTDOWN, "its host is gone", host)
        self.forget(rank)  # it may have run on a host that was lost
        member.ranks.append(rank)
        member.served.add(rank)
        self._starts[rank] = start
        output.add_fed_later(rank)
        self._tell(member.place.index, Again(RankTask(rank, dict(environ), start)))
        return RemoteRank(rank, self._teller(member.place.index))

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
        self._output = output

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

    def credit_of(self, rank: int) -> Credit:
        """Return the Credit object of the agent that runs ``rank``, by which streams are sent to this agent."""
        credit = next(member.credit for member in self.members if rank in member.ranks)
        assert credit is not None
        return credit

    def results(self) -> dict[int, bytes]:
        """Return the pickled results of the function, by rank. Ranks that have sent no result are missing."""
        found = [
            (rank, data) for member in self.members for rank, data in member.results.items() if rank in member.ranks
        ]
        return {rank: bytes(data) for rank, data in found}

    def pids(self) -> dict[int, tuple[int, str]]:
        """Return, by rank, the process id and the host. Call this after all agents have started their ranks."""
        begun = [(member.place, member.begun.pids) for member in self.members if member.begun is not None]
        return {rank: (pid, place.host) for place, pids in begun for rank, pid in zip(place.ranks, pids)}

    # --- the end

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Wait until every agent has sent its last message or is lost. Call this after all ranks have ended.

        Stop waiting if no output has arrived for 4 seconds, unless a slow screen has not yet shown all received output.
        Stop waiting at once if ``give_up()`` becomes true.
        """
        before = self._arrived
        while not self._wait(lambda m: m.over, time.monotonic() + _CLEARED_S, give_up):
            if give_up() or (not self._feeding and self._arrived == before):
                return
            before = self._arrived

    def close(self) -> None:
        """Tell every agent to kill its ranks and to end, and then end the commands that started the agents."""
        for member in self.members:
            if member.credit is not None:
                member.credit.close()
            if member.here:
                self._tell(member.place.index, Quit())
        until_s = time.monotonic() + _LET_GO_S
        for started in self._started:
            called = any(self.members[index].here for index in started.command.agents)
            started.close(max(0.0, until_s - time.monotonic()) if called else 0.0)

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
            self._take(agent, member, message)
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

    def _take_over(self, agent: int, member: Agent, message: Adopt) -> None:
        with self._changed:
            is_known = member.adopted is not None  # it connects again, because it has not heard the answer
            if self._adopts and not is_known:
                for place, start in (process for world in message.worlds for process in world.processes):
                    self._starts[place] = max(start, self._starts.get(place, 0))
                if not member.gone and _has_older(message, self._starts):
                    self._set_aside(member, message)
            late = bool(member.gone) or not (is_known or self._adopts)
            if not late and not is_known:
                member.adopted, member.here = message, True
                member.ranks = [place for (place, _), _ in message.running]
                member.begun = Begun(tuple(pid for _, pid in message.running))
                member.wants_to_leave = message.leaves
                assert self._output is not None
                for (place, start), _ in (*message.running, *message.ended):
                    self._starts[place] = max(start, self._starts.get(place, 0))
                    self._output.add_fed_later(place)  # also what those that have ended had still to say
                for other in self.members:
                    if other.adopted is not None and _has_older(other.adopted, self._starts):
                        self._set_aside(other, other.adopted)
            self._changed.notify_all()
        if late:
            self._disown(member)
        else:
            self._tell(agent, Adopted())

    def _set_aside(self, member: Agent, told: Adopt) -> None:
        """Give up the agent ``member``, as the lost launcher had done. ``told`` is what the agent has told this successor."""
        self._say(f"{member.place.host} is given up, as the launcher had done: its ranks are told to end")
        member.gone = _GIVEN_UP
        member.adopted = replace(told, running=())  # what it knows of worlds and of deaths counts
        ranks, member.ranks = member.ranks, []
        # These are no ends of the processes that run at their places now.
        self._early = [one for one in self._early if one[0] not in ranks]
        self._disown(member)
        self.unheard(ranks, False)

    def _take(self, agent: int, member: Agent, piece: Data) -> None:
        nbytes = len(piece.data)
        self._arrived += nbytes
        if piece.stream == "result":
            member.results.setdefault(piece.rank, bytearray()).extend(piece.data)
            self._tell(agent, Ack(nbytes))
        elif _PART.fullmatch(piece.stream):
            self._write_part(member, piece)
            self._tell(agent, Ack(nbytes))
        elif self._output is not None:
            with self._changed:
                self._feeding += 1
            self._output.feed(piece.rank, piece.stream, piece.data, lambda: self._shown(agent, nbytes))

    def _write_part(self, member: Agent, piece: Data) -> None:
        if self.timeline_dir is None or piece.rank not in member.served or not piece.data:
            return
        # In an elastic job, processes of one rank may have run on several hosts, each of which numbers its own parts.
        key = piece.rank, piece.stream
        if key not in member.parts:
            member.parts[key] = part_of(self.timeline_dir, piece.rank)
        path = member.parts[key]
        try:
            with open(path, "ab") as file:
                file.write(piece.data)
        except OSError as error:
            self._say(f"{path}: {error.strerror}")
            self.timeline_dir = None

    def _shown(self, agent: int, nbytes: int) -> None:
        with self._changed:
            self._feeding -= 1
        self._tell(agent, Ack(nbytes))

    # --- in any thread

    def _command_ended(self, started: Started, code: int) -> None:
        for index in started.command.agents:
            member = self.members[index]
            if member.begun is not None and started.command.task == "public":
                continue  # such a command may end before its agent; if the agent has ended, too, it is silent
            if not member.over:
                certain = len(started.command.agents) == 1 and self._launcher.proves_end(code)
                self._lose(member, self._explain(member, started, code), certain)

    def _explain(self, member: Agent, started: Started, code: int | None) -> str:
        if member.here:
            last = started.text.strip().splitlines()[-1:]
            return f"its agent ended{f': {last[0]}' if last else ''}"
        return self._launcher.explain(member.place.host, code, started.text)

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
        assert self._server is not None
        self._server.tell(agent, encode(message))

    def _teller(self, agent: int) -> Callable[[ToAgent], None]:
        return lambda message: self._tell(agent, message)

    def _sender(self, agent: int) -> Callable[[bytes], None]:
        assert self._server is not None
        server = self._server
        return lambda data: server.tell(agent, data)

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


def _has_older(told: Adopt, starts: Mapping[int, int]) -> bool:
    """Return whether the agent that has ``told`` this runs a process at whose place a later one has run, as in ``starts``.

    The launcher then had given up the agent, or it would not have started the later one. ``starts`` has the processes of
    other agents, and those of the worlds that agents have been told of.
    """
    return any(start < starts.get(place, 0) for (place, start), _ in told.running)
