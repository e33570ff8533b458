"""Create the jobs of ranks that are threads of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ddl_conform.plugin import ddl_transports
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.job import Job
from ddlcore.process.jobs import local_jobs
from ddlcore.version import VERSION

__all__ = ["thread_jobs"]


def thread_jobs(
    size: int,
    *,
    backend: str,
    settings: Mapping[str, object] | None = None,
    hosts: Sequence[int] | None = None,
    registry: Registry | None = None,
    driver: SearchDriver | None = None,
) -> list[Job]:
    """Return ``size`` jobs that form a world within this process; see ``local_jobs`` for the arguments.

    The transport ``threads`` is there also if the user's allow or deny list excludes this package: whoever calls this
    function uses the package.
    """
    if registry is None:
        registry = settings_of(os.environ, {"backend": backend, **(settings or {})})[1]
    for provider in ddl_transports():
        if provider.name not in registry.transports:
            registry.offer(provider, Distribution("ddl-conform", VERSION))
    return local_jobs(size, backend=backend, settings=settings, hosts=hosts, registry=registry, driver=driver)
