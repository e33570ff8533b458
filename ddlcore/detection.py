"""Ask the cluster plugins which rank this process is, for a process that ``ddl run`` has not started."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddlcore.contracts.cluster import Surroundings
from ddlcore.control.surroundings import lineage
from ddlcore.job import log_at
from ddlcore.plug.settings import settings_of, warn_of_misspelt

if TYPE_CHECKING:
    from ddlcore.external_rank import ExternalRank
    from ddlcore.plug.registry import Registry

log = logging.getLogger("ddl")


def detect(environ: Mapping[str, str]) -> tuple[ExternalRank | None, Registry]:
    """Return this process as a rank of another launcher, and the registry of plugins in which the launcher was found.

    The rank is None if no other launcher has started this process, or if the launcher has started only this process.
    Raises ValueError with a message of one line if the launcher's variables are incomplete or contradictory.
    """
    settings, registry = settings_of(environ, warns=False)
    around = Surroundings(environ, socket.gethostname(), lineage)
    for provider in sorted(registry.clusters.values(), key=lambda one: -one.priority):
        if registry.missing(provider):
            continue
        rank_info = registry.load(provider)().rank_info(around)
        if rank_info is None:
            continue
        log_at(settings.text("log_level"))
        if rank_info.warning:
            log.warning("%s", rank_info.warning)
        if rank_info.rank == 0:  # the other ranks have the same environment
            warn_of_misspelt(environ, registry)
        if rank_info.size == 1:
            return None, registry
        from ddlcore.external_rank import ExternalRank  # imports ZeroMQ, which a world of one rank does not need

        return ExternalRank(provider.name, rank_info, settings, registry, environ), registry
    warn_of_misspelt(environ, registry)
    return None, registry
