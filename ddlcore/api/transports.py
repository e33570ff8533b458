"""Questions about transports: what is installed, and what the present world uses."""

from __future__ import annotations

import os

from ddlcore.api.world import current_job
from ddlcore.job import settings_of

__all__ = ["built", "enabled"]


def built(transport: str) -> bool:
    """Whether a transport of that name is installed and could be used here. May be asked before ``init``."""
    _, registry = settings_of(os.environ)
    provider = registry.transports.get(transport)
    return provider is not None and not registry.missing(provider)


def enabled(transport: str) -> bool:
    """Whether the present world's global process set uses it, alone or among others. Raises NotInitialized before ``init``."""
    route = current_job().sets.communicator(0).route
    return any(provider.name == transport for provider in route.providers())
