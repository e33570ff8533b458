"""The agents of a job whose launcher is lost: its successor takes them over."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from ddlcore.contracts.launcher import AgentPlace, Launcher, StartCommand, StartPlan
from ddlcore.control.server import Server
from ddlcore.launch.agents.agent_pool import AgentPool, Unheard
from ddlcore.launch.agents.agent_record import Agent
from ddlcore.launch.agents.wire import Adopt, Adopted, Begun
from ddlcore.launch.output.output import Output
from ddlcore.messages.ranks import LaunchedRank, StartNumber

_GIVEN_UP = "the launcher had given it up"


class _NoLauncher(Launcher):
    """Starts no agents: those of the lost launcher go on."""

    def commands(self, plan: StartPlan) -> Sequence[StartCommand]:
        return ()


class OrphanedAgents(AgentPool):
    """The agents of a job whose launcher is lost, as its successor knows them.

    ``places`` has an entry for each number of an agent. The host of one that the launcher had given up is "".
    """

    def __init__(self, places: Sequence[AgentPlace], say: Callable[[str], None], unheard: Unheard) -> None:
        super().__init__(places, _NoLauncher(), say, unheard)
        self._adopts = False  # whether agents may still come

    def adopt(self, server: Server, expected: Collection[int], timeout_s: float, output: Output) -> list[Agent]:
        """Wait until the agents with the numbers ``expected`` have come to ``server``, and return all that have come.

        Call this instead of ``call`` and ``begin``. It waits at most ``timeout_s`` seconds. Agents that have not come by
        then count as lost, and are told to end if they come later. ``output`` shows what ranks write.
        """
        self._server, self.streams.output = server, output
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

    def _take_over(self, agent: int, member: Agent, message: Adopt) -> None:
        with self._changed:
            is_known = member.adopted is not None  # it connects again, because it has not heard the answer
            if self._adopts and not is_known:
                for place, start in (process for world in message.worlds for process in world.processes):
                    self.ranks.starts[place] = max(start, self.ranks.starts.get(place, start))
                if not member.gone and _has_older(message, self.ranks.starts):
                    self._set_aside(member, message)
            late = bool(member.gone) or not (is_known or self._adopts)
            if not late and not is_known:
                member.adopted, member.here = message, True
                member.ranks = [place for (place, _), _ in message.running]
                member.begun = Begun(tuple(pid for _, pid in message.running))
                member.wants_to_leave = message.leaves
                assert self.streams.output is not None
                for (place, start), _ in (*message.running, *message.ended):
                    self.ranks.starts[place] = max(start, self.ranks.starts.get(place, start))
                    self.streams.output.add_fed_later(place)  # also what those that have ended had still to say
                for other in self.members:
                    if other.adopted is not None and _has_older(other.adopted, self.ranks.starts):
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
        # Other processes may run under the numbers of these ranks now. So the ends that the agent has reported must not
        # count as the ends of those processes.
        self.ranks.set_aside(ranks)
        self._disown(member)
        self._lose_ranks(ranks, False)


def _has_older(told: Adopt, starts: Mapping[LaunchedRank, StartNumber]) -> bool:
    """Return whether the agent that has ``told`` this runs a process at whose place a later one has run, as in ``starts``.

    The launcher then had given up the agent, or it would not have started the later one. ``starts`` has the processes of
    other agents, and those of the worlds that agents have been told of.
    """
    return any(start < starts.get(place, 0) for (place, start), _ in told.running)
