"""The ranks that agents run: how the launcher's supervisor watches them, starts them again and learns of their ends."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.streams import RankStreams
from ddlcore.launch.agents.wire import Again, Ended, RankTask, Signal, ToAgent
from ddlcore.launch.output.output import Output
from ddlcore.launch.ranks.supervisor import Supervisor
from ddlcore.messages.ranks import FIRST_START, LaunchedRank, StartNumber


class RemoteRank:
    """A rank that an agent has started. A supervisor can watch it like a local rank: it implements ``Watched``."""

    process = None

    def __init__(self, rank: LaunchedRank, tell: Callable[[ToAgent], None]) -> None:
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


class AgentRanks:
    """The ranks that the agents of one job run. The main thread calls the methods, unless a method says otherwise."""

    def __init__(self, agents: Sequence[Agent], tell: Callable[[int, ToAgent], None], streams: RankStreams) -> None:
        """Begin with the ranks that ``agents`` have. There may be more agents later.

        ``tell(agent, message)`` sends a message to an agent. ``streams`` takes what the ranks write.
        """
        # By rank: how many processes ran there before the present one, if not 0.
        self.starts: dict[LaunchedRank, StartNumber] = {}
        self._agents = agents
        self._tell = tell
        self._streams = streams
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        # Ends of ranks that arrived before there was a supervisor.
        self._early: list[tuple[LaunchedRank, int, str, bool]] = []

    def join(self, output: Output) -> None:
        """Register the ranks of all agents with ``output``, which will show the lines that these ranks write.

        Call this before ``output.start`` and before the agents start their ranks.
        """
        for member in self._agents:
            for rank in member.ranks:
                output.add_fed(rank)
        self._streams.output = output

    def all(self) -> list[RemoteRank]:
        """Return one RemoteRank for each rank that agents run. A supervisor watches the ranks by these objects."""
        return [
            RemoteRank(rank, partial(self._tell, member.place.index))
            for member in self._agents
            for rank in member.ranks
        ]

    def again(
        self, host: str, rank: LaunchedRank, environ: Mapping[str, str], start: StartNumber = FIRST_START
    ) -> RemoteRank:
        """Start another process of ``rank``, whose process has ended, and return what a supervisor can watch.

        ``environ`` are the variables that only this rank gets, and ``start`` is the number of processes that it had before.
        Raises OSError if no agent serves ``host``. If the agent is lost meanwhile, the supervisor learns that the rank is
        lost.
        """
        member = next((member for member in self._agents if member.place.host == host and not member.over), None)
        if member is None:
            raise OSError(errno.EHOSTDOWN, "its host is gone", host)
        self.forget(rank)  # it may have run on a host that was lost
        member.ranks.append(rank)
        member.served.add(rank)
        self.starts[rank] = start
        assert self._streams.output is not None
        self._streams.output.add_fed_later(rank)
        tell = partial(self._tell, member.place.index)
        tell(Again(RankTask(rank, dict(environ), start)))
        return RemoteRank(rank, tell)

    def forget(self, rank: LaunchedRank) -> None:
        """Remove ``rank`` from the agent that has run it, because its process has ended there."""
        for member in self._agents:
            if rank in member.ranks:
                member.ranks.remove(rank)

    def results(self) -> dict[LaunchedRank, bytes]:
        """Return the pickled results of the function, by rank. Ranks that have sent no result are missing."""
        found = [
            (rank, self._streams.result(member.place.index, rank)) for member in self._agents for rank in member.ranks
        ]
        return {rank: result for rank, result in found if result is not None}

    # --- their ends

    def attach(self, supervisor: Supervisor) -> None:
        """Report the end of each rank to ``supervisor`` from now on.

        Ends that arrived before this call are reported at once.
        """
        # An agent's rank may end before the launcher has built its supervisor: Begun and Ended can arrive together, in
        # the server's thread. The lock makes sure that each end is either added to `_early` or reported to the
        # supervisor: no end is lost and no end is reported twice. The supervisor is called without the lock, because it
        # protects its own queues.
        with self._lock:
            self._supervisor = supervisor
            early, self._early = self._early, []
        for rank, returncode, lost, certain in early:
            supervisor.ended_on_host(rank, returncode, lost, certain)

    def heard_end(self, agent: Agent, message: Ended) -> None:
        """Handle the message of ``agent`` that one of its ranks has ended. The control server's thread calls this."""
        # An agent that was lost may come back, but its ranks were given up: others may run at their places now.
        is_present = message.rank in agent.ranks and message.start >= self.starts.get(message.rank, 0)
        if not agent.gone and is_present:
            self.ended(message.rank, message.returncode, message.lost)

    def ended(self, rank: LaunchedRank, returncode: int, lost: str, certain: bool = True) -> None:
        """Record the end of ``rank``, as ``Supervisor.ended_on_host`` describes it. Any thread may call this."""
        with self._lock:
            if self._supervisor is None:
                self._early.append((rank, returncode, lost, certain))
                return
        self._supervisor.ended_on_host(rank, returncode, lost, certain)

    def set_aside(self, ranks: Collection[LaunchedRank]) -> None:
        """Forget the ends of ``ranks`` that came before there was a supervisor. Any thread may call this."""
        with self._lock:
            self._early = [one for one in self._early if one[0] not in ranks]
