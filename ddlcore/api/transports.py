"""Questions about transports: what is installed, and what the present world uses."""

from __future__ import annotations

import os

from ddlcore.api.world import current_job
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.settings import settings_of

__all__ = ["built", "built_version", "enabled", "threads_supported"]


def built(transport: str) -> bool:
    """Whether a transport of that name is installed and could be used here. May be asked before ``init``."""
    _, registry = settings_of(os.environ)
    provider = registry.transports.get(transport)
    return provider is not None and not registry.missing(provider)


def built_version(transport: str) -> int:
    """The version code of the library behind that transport, which this loads; 0 where it could not be used here.

    1 where there is no such library. May be asked before ``init``.
    """
    _, registry = settings_of(os.environ)
    provider = registry.transports.get(transport)
    if provider is None or registry.missing(provider):
        return 0
    library = registry.library(provider)
    return library.version if library else int(not provider.library)


def enabled(transport: str) -> bool:
    """Whether the present world's global process set uses it, alone or among others. Raises NotInitialized before ``init``.

    For tensors on a device that is settled when the set's first bucket there runs; until then it is not used.
    """
    return transport in current_job().sets.transports(0)


def threads_supported(library: str) -> bool:
    """Whether the library of communicators of that name may be called by the program while the job calls it.

    Raises NotInitialized (a ValueError) before ``init``, and ValueError where that library is not installed or
    does not connect the processes of this job. Every rank calls it.
    """
    job = current_job()
    provider = job.registry.communicators.get(library)
    missing = (
        f"it is not installed; {ALIASES['transport'].get(library, 'no plugin of that name is known')}"
        if provider is None
        else job.registry.missing(provider)
    )
    if provider is None or missing:
        raise ValueError(f"this job does not use {library}: {missing}")
    return job.registry.load(provider)().threads_supported(job.size)
