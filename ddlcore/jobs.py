"""Makes the jobs of a world: that of a launched process, of a process alone, or of ranks that are threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddlcore.build import build_sessions
from ddlcore.config import Environment
from ddlcore.control.channel import Channel
from ddlcore.control.local import LocalNetwork
from ddlcore.control.store import JobStore
from ddlcore.elastic_member import ElasticMember, JobBeforeWorld
from ddlcore.job import Job
from ddlcore.messages import World
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.types import Placement

if TYPE_CHECKING:
    from ddlcore.coordinator.tuning import SearchDriver


def launched_job(environment: Environment, ranks: tuple[int, ...] | None, ordinal: int) -> Job:
    """Return this process's job in a world of ``ranks`` (None: all ranks) that ``ddl run`` has launched.

    ``ordinal``: how many times this rank has asked for a world of these ranks, with this time.
    """
    from ddlcore.control.client import connect  # imports ZeroMQ, which a world of one does not need

    settings, registry = settings_of(os.environ)
    launched = environment.placement
    everyone = tuple(range(launched.size))
    return Job(
        launched,
        everyone if ranks is None else ranks,
        ordinal,
        lambda: connect(environment.job_file, launched.rank),
        registry,
        settings,
        environment.address,
        environment.launcher,
        environment.timeline_dir,
    )


def elastic_job(environment: Environment) -> tuple[Job, ElasticMember]:
    """Return the job of a process of an elastic job before its first world, and what brings it into worlds."""
    from ddlcore.control.client import connect

    settings, registry = settings_of(os.environ)
    launched = environment.placement

    def network() -> tuple[Channel, JobStore]:
        return connect(environment.job_file, launched.rank)

    def in_world(world: World) -> Job:
        here = Placement(launched.rank, world.hosts)
        place = (environment.address, environment.launcher, environment.timeline_dir)
        return Job(here, world.members, world.generation, network, registry, settings, *place, elastic=True)

    everyone = tuple(range(launched.size))
    before = JobBeforeWorld(launched, everyone, 0, network, registry, settings)
    return before, ElasticMember(launched.rank, network, in_world)


def lone_job(registry: Registry | None = None) -> Job:
    """Return the job of a world of one rank, without a launcher.

    ``registry``: the registry of the plugins if they have been loaded already; None loads them.
    """
    return local_jobs(1, backend="auto", registry=registry)[0]


def local_jobs(
    size: int,
    *,
    backend: str = "threads",
    settings: Mapping[str, object] | None = None,
    hosts: Sequence[int] | None = None,
    registry: Registry | None = None,
    driver: SearchDriver | None = None,
) -> list[Job]:
    """Return ``size`` jobs that form a world within this process: each is for one thread, and none is started yet.

    ``hosts``: the host index of each rank; None: all are on one host. ``driver`` searches for better settings while the
    jobs run.
    """
    given, registry = settings_of(os.environ, {"backend": backend, **(settings or {})}, registry=registry)
    network = LocalNetwork(size, build_sessions(size, given, registry, driver))
    placed = tuple(hosts) if hosts is not None else (0,) * size

    def meet(rank: int) -> Callable[[], tuple[Channel, JobStore]]:
        return lambda: (network.channel(rank), network.store(rank))

    everyone = tuple(range(size))
    return [Job(Placement(rank, placed), everyone, 1, meet(rank), registry, given) for rank in everyone]
