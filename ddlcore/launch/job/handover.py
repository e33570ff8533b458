"""Keeps the agents of an elastic job informed of what a successor of the launcher would need."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ddlcore.coordinator.membership import ElasticMembership
from ddlcore.launch.job.history import History
from ddlcore.launch.job.host_table import HostTable

if TYPE_CHECKING:
    from ddlcore.launch.agents.agent_pool import AgentPool
    from ddlcore.launch.agents.wire import Handover


class _Knows(Protocol):
    @property
    def agents(self) -> AgentPool: ...

    def handover(self, hosts: Sequence[tuple[str, int]], places: int, most: int, directory: Path) -> Handover: ...


log = logging.getLogger("ddl")


def directory_of_successors(output_dir: Path | None) -> Path:
    """Return the directory where a successor writes the output of the job: ``output_dir``, or a new name for each job.

    The directory is made by the successor, on its host.
    """
    if output_dir is not None:
        return output_dir.absolute()
    return Path.cwd() / f"ddl-continued-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class HandingOver:
    """Tells all agents what a successor needs, whenever that has changed. The supervisor's thread calls it."""

    def __init__(self, remote: _Knows, most: int, directory: Path) -> None:
        self._remote = remote
        self._most = most
        self._directory = directory
        self._told: Handover | None = None

    def __call__(self, table: HostTable) -> None:
        hosts = [(host.name, host.slots) for host in table.hosts]
        handover = self._remote.handover(hosts, table.places, self._most, self._directory)
        if handover != self._told:
            self._told = handover
            self._remote.agents.hand_over(handover)


def tell_of_world(agents: AgentPool, membership: ElasticMembership, history: History, stopped: str) -> None:
    """Tell all agents of the world that has opened last, so that a successor could go on from there.

    ``history`` has the totals of the job. ``stopped`` says why the ranks stop; "" if they do not.
    """
    world = membership.opened()
    if world is not None:
        world = replace(world, complete=membership.complete, stopped=stopped)
        log.debug("to agents: %s", world)
        agents.tell_of_world(history.add_totals(world))
