"""Functions that return whether a transport is installed, and whether the current world uses the transport."""

from __future__ import annotations

import os

from ddlcore.api.world import current_job
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.settings import settings_of
from ddlcore.text.installing import pip_install

__all__ = ["built", "built_version", "enabled", "threads_supported"]


def built(transport: str) -> bool:
    """Return whether the transport with the name ``transport`` is installed and this process can use it.

    This function may be called before ``init``.
    """
    _, registry = settings_of(os.environ, warns=False)
    provider = registry.transports.get(transport)
    return provider is not None and not registry.missing(provider)


def built_version(transport: str) -> int:
    """Return the version code of the library that the transport uses, or 0 if this process cannot use the transport.

    The call loads that library. The result is 1 if the transport uses no library. This function may be called before
    ``init``.
    """
    _, registry = settings_of(os.environ, warns=False)
    provider = registry.transports.get(transport)
    if provider is None or registry.missing(provider):
        return 0
    library = registry.library(provider)
    return library.version if library else int(not provider.library)


def enabled(transport: str) -> bool:
    """Return whether the global process set of the current world uses the transport, alone or with other transports.

    The transport for tensors on a device is chosen when the first bucket on that device runs. Until that moment, the
    result for such a transport is False. Raises NotInitialized before ``init``.
    """
    return transport in current_job().sets.transports(0)


def threads_supported(library: str) -> bool:
    """Return whether the user's program may call a communication library at the same time as the job.

    ``library``: the name by which a plugin offers the library's communicators. Every rank must call this. Raises
    NotInitialized (a ValueError) before ``init``. Raises ValueError if the library is not installed or does not connect
    the processes of this job.
    """
    job = current_job()
    provider = job.registry.communicators.get(library)
    if provider is None:
        plugin = ALIASES["transport"].get(library)
        how = (job.registry.off(plugin) or pip_install(plugin)) if plugin else "no plugin of that name is known"
        missing = f"it is not installed; {how}"
    else:
        missing = job.registry.missing(provider)
    if provider is None or missing:
        raise ValueError(f"this job does not use {library}: {missing}")
    return job.registry.load(provider)().threads_supported(job.size)
