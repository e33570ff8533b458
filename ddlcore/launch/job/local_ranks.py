"""Start the ranks of this host and create their supervisor. ``ddl run`` and ``ddlcore.run`` use this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddlcore.config.loading import Settings
from ddlcore.launch.output.output import Output
from ddlcore.launch.ranks.environment import (
    HostFacts,
    RankVariables,
    late_environment,
    master_port,
    own_environments,
    setting_variables,
    shared_environment,
    thread_variables,
    usable_cores,
    wanted_port,
)
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.launch.ranks.process import RankProcess
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.types import Placement

if TYPE_CHECKING:
    from ddlcore.launch.agents.remote_launch import RemoteLaunch


# The second argument is the host index of each rank so far.
LateEnvironment = Callable[[LaunchedRank, Sequence[int]], dict[str, str]]


def chosen_port(layout: Layout, environ: Mapping[str, str]) -> int:
    """Return the value for the variable MASTER_PORT: the port that the user has set, or else a free port.

    Returns 0 if the user has not set the variable and rank 0 is on another host.
    """
    return master_port(environ) if layout.ranks[0] == layout.here else wanted_port(environ)


def local_environments(
    layout: Layout,
    remote: RemoteLaunch | None,
    settings: Settings,
    environ: Mapping[str, str],
    job_file: str,
    port: int,
    timeline_dir: Path | None = None,
) -> tuple[dict[str, str], dict[LaunchedRank, dict[str, str]], LateEnvironment]:
    """Return the environments of the ranks of this host, as a tuple of three values.

    The first value is the variables for thread counts that the user has not set. The second is the complete environment
    of each rank of this host. The third is a function that returns the environment of a process that is started on this
    host while other ranks already train. ``remote`` is None if the job has no agents. ``port`` is the value of
    MASTER_PORT. ``timeline_dir`` is the directory for parts of a timeline, or None if no timeline is wanted.
    """
    parts = str(timeline_dir or "")
    local = layout.ranks_of(0) if remote is None else remote.remote_plan.local_ranks
    threads = thread_variables(environ, usable_cores(), max(1, len(local)))
    told, elastic = RankVariables.of(settings), settings.whole("min_np") > 0
    shared = shared_environment(environ, {**threads, **setting_variables(settings)}, told.torchrun)
    if remote is None:
        owns = own_environments(layout.ranks, (HostFacts(job_file, timeline_dir=parts),), port, told, elastic)
    else:
        owns = remote.environments(job_file, port, parts)

    def late(rank: LaunchedRank, hosts: Sequence[int]) -> dict[str, str]:
        if remote is not None:
            return {**shared, **remote.own_variables(rank, layout.hosts[layout.here], hosts)}
        here = HostFacts(job_file, timeline_dir=parts)
        return {**shared, **late_environment(Placement(rank, tuple(hosts)), here, "", port, told)}

    return threads, {rank: {**shared, **owns[rank]} for rank in local}, late


def begin_all(
    ranks: Sequence[LaunchedRank], begin: Callable[[LaunchedRank], RankProcess], output: Output
) -> list[RankProcess]:
    """Start all ``ranks`` of this host by calling ``begin``, and register their pipes with ``output``.

    If a rank cannot be started, kill the ranks that were started before, and raise the error again.
    """
    processes: list[RankProcess] = []
    try:
        for rank in ranks:
            processes.append(begin(rank))
        for process in processes:
            output.add(process.rank, process.stdout, process.stderr)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes
