"""Watches the ranks of one job from their start to their end. ``ddl run``, ``ddlcore.run`` and a successor use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddlcore.config.loading import Settings
from ddlcore.contracts.discovery import HostDiscovery
from ddlcore.control.server import Server
from ddlcore.launch.job.growth import Growth
from ddlcore.launch.job.network import ObservedCoordinator
from ddlcore.launch.job.watch import RunningRanks, Watches
from ddlcore.launch.ranks.exit_status import End
from ddlcore.launch.ranks.supervisor import Supervisor, Watched

if TYPE_CHECKING:
    from ddlcore.launch.agents.agent_pool import AgentPool


class RunningJob:
    """The running ranks of one job, and all who are told when one of them ends."""

    def __init__(
        self,
        processes: Sequence[Watched],
        settings: Settings,
        server: Server,
        observed: ObservedCoordinator,
        say: Callable[[str], None],
        agents: AgentPool | None,
        growth: Growth | None,
        watches: Watches,
    ) -> None:
        """Create the supervisor of all ranks: ``processes`` of this host, and those that ``agents`` run.

        ``agents`` is None if the job has none. ``growth`` starts ranks again, and is None if the job is not elastic.
        ``say`` shows a line to the user.
        """
        self._server = server
        self._failure_log = observed
        self._growth = growth
        self._watches = watches
        self.supervisor = Supervisor(
            [*processes, *(agents.ranks.all() if agents is not None else [])],
            grace_s=settings.number("grace_s"),
            ended=self._ended,
            say=say,
            revival=growth,
            begin=None if growth is None else growth.begin,
        )
        if agents is not None:
            agents.ranks.attach(self.supervisor)
        observed.kill = self.supervisor.kill_silent

    def run(self, host_of: Callable[[int], str], discovery: HostDiscovery | None = None) -> list[End]:
        """Watch the ranks until all have ended, and return the ends that determine the job's exit code.

        ``host_of`` names the host of a rank. ``discovery`` finds hosts for an elastic job; None: no host is added.
        """
        growth, history = self._growth, self._failure_log.history
        if growth is None:
            self._watches.begin(RunningRanks(self.supervisor.abandon, host_of, str))
            return self.supervisor.run()
        try:
            growth.attach(self.supervisor, discovery)
            status = history.status if history is not None else str
            self._watches.begin(RunningRanks(self.supervisor.abandon, growth.host_name, status))
            self.supervisor.run()
        finally:
            growth.close()
        return growth.relevant()

    def _ended(self, end: End) -> None:
        if self._failure_log.history is not None:
            self._failure_log.history.ended(end)  # first: the world that follows may begin at once
        self._server.rank_ended(end.rank, end.reason, end.certain)
        self._watches.rank_ended(end)
