"""Creates the Job objects of a world.

There is one function for each case: a process that ``ddl run`` has launched, a process of an elastic job, a process
without a launcher, and ranks that are threads of one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddlcore.control.channel import Channel
from ddlcore.control.store import JobStore
from ddlcore.messages.elastic import NextWorld
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_sessions
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job
from ddlcore.process.world_place import WorldPlace
from ddlcore.types import Placement

if TYPE_CHECKING:
    from ddlcore.coordinator.tuning import SearchDriver
    from ddlcore.process.elastic_member import ElasticMember


def launched_job(
    environment: Environment, ranks: tuple[LaunchedRank, ...] | None, ordinal: int, environ: Mapping[str, str]
) -> Job:
    """Return the job of this process, which ``ddl run`` has launched. The job is not started yet.

    ``environment``: the values that the launcher has passed. ``ranks``: the launched ranks that are in the world; None:
    all of them. ``ordinal``: how many times this rank has asked for a world of these ranks, including this call.
    ``environ``: the environment variables from which settings are read.
    """
    from ddlcore.control.client import connect  # imports ZeroMQ, which a world of one does not need

    settings, registry = settings_of(environ)
    launched = environment.placement
    everyone = tuple(map(LaunchedRank, range(launched.size)))
    given = (environment.address, environment.launcher, environment.timeline_dir)
    world_place = WorldPlace(launched, everyone if ranks is None else ranks, ordinal, False, *given)
    return Job(world_place, lambda: connect(environment.job_file, launched.rank), registry, settings)


def elastic_job(environment: Environment, environ: Mapping[str, str]) -> tuple[Job, ElasticMember]:
    """Return two objects for this process of an elastic job: the job before its first world, and the ElasticMember.

    ``environment``: the values that the launcher has passed. ``environ``: see ``launched_job``. The ElasticMember makes
    this process a member of a world.
    """
    from ddlcore.control.client import connect
    from ddlcore.process.elastic_member import ElasticMember, JobBeforeWorld  # other jobs do not need this module

    settings, registry = settings_of(environ)
    launched = environment.placement

    def network() -> tuple[Channel, JobStore]:
        return connect(environment.job_file, launched.rank)

    def in_world(world: NextWorld) -> Job:
        here = Placement(launched.rank, world.hosts)
        given = (environment.address, environment.launcher, environment.timeline_dir)
        return Job(WorldPlace(here, world.members, world.generation, True, *given), network, registry, settings)

    before = JobBeforeWorld(
        WorldPlace(launched, tuple(map(LaunchedRank, range(launched.size))), 0), network, registry, settings
    )
    return before, ElasticMember(network, in_world)


def lone_job(registry: Registry | None, environ: Mapping[str, str]) -> Job:
    """Return the job of a world of one rank, without a launcher. The job is not started yet.

    ``registry``: the registry of the plugins if they have been loaded already. None: load them now. ``environ``: see
    ``launched_job``.
    """
    return local_jobs(1, backend="auto", registry=registry, environ=environ)[0]


def local_jobs(
    size: int,
    *,
    backend: str,
    settings: Mapping[str, object] | None = None,
    hosts: Sequence[int] | None = None,
    registry: Registry | None = None,
    driver: SearchDriver | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Job]:
    """Return ``size`` jobs that form a world within this process. Each job is for one thread. No job is started yet.

    ``backend``: the value of the setting ``backend``. ``settings``: values of other settings. ``hosts``: the host index
    of each rank; None: all ranks count as ranks of one host. ``registry``: see ``lone_job``. ``driver`` searches for
    better settings while the jobs run. ``environ``: see ``launched_job``; None: those of this process.
    """
    from ddlcore.control.local import LocalNetwork  # a rank of a launcher does not need this module

    asked = {"backend": backend, **(settings or {})}
    given, registry = settings_of(dict(os.environ) if environ is None else environ, asked, registry=registry)
    network = LocalNetwork(size, build_sessions(size, given, registry, driver))
    placed = tuple(hosts) if hosts is not None else (0,) * size

    def meet(rank: LaunchedRank) -> Callable[[], tuple[Channel, JobStore]]:
        return lambda: (network.channel(rank), network.store(rank))

    everyone = tuple(map(LaunchedRank, range(size)))
    return [Job(WorldPlace(Placement(rank, placed), everyone, 1), meet(rank), registry, given) for rank in everyone]
