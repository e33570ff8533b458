"""Find out which rank this process is, if a launcher other than ``ddl run`` has started it.

The plugins for clusters answer this question.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddlcore.contracts.cluster import Surroundings
from ddlcore.control.surroundings import lineage
from ddlcore.plug.settings import settings_of, warn_of_misspelt
from ddlcore.process.job import log_at

if TYPE_CHECKING:
    from ddlcore.plug.registry import Registry
    from ddlcore.process.external_rank import ExternalRank

log = logging.getLogger("ddl")


def detect(environ: Mapping[str, str]) -> tuple[ExternalRank | None, Registry]:
    """Find out whether another launcher has started this process as a rank. Return the rank and the plugins' registry.

    ``environ``: the environment variables of this process. The returned rank is None if no other launcher has started
    this process, or if the other launcher has started no other process than this one. Raises ValueError with a message
    of one line if the variables that the launcher has set are incomplete or contradictory.
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
        from ddlcore.process.external_rank import (
            ExternalRank,  # imports ZeroMQ, which a world of one rank does not need
        )

        return ExternalRank(provider.name, rank_info, settings, registry, environ), registry
    warn_of_misspelt(environ, registry)
    return None, registry
