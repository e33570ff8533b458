"""Asks the clusters who this process is, where `ddl run` has not said so."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddlcore.contracts.cluster import Surroundings
from ddlcore.control.surroundings import lineage
from ddlcore.job import log_at
from ddlcore.plug.settings import settings_of

if TYPE_CHECKING:
    from ddlcore.guest import Guest
    from ddlcore.plug.registry import Registry

__all__ = ["recognise"]

log = logging.getLogger("ddl")


def recognise(environ: Mapping[str, str]) -> tuple[Guest | None, Registry]:
    """This process as a rank of another launcher's; None where none has started it, or it has started this one alone.

    With the plugins that were asked. Raises ValueError in one line where what a launcher has set is incomplete or contradicts itself.
    """
    settings, registry = settings_of(environ)
    around = Surroundings(environ, socket.gethostname(), lineage)
    for provider in sorted(registry.clusters.values(), key=lambda one: -one.priority):
        if registry.missing(provider):
            continue
        seat = registry.load(provider)().seat(around)
        if seat is None:
            continue
        log_at(settings.text("log_level"))
        if seat.warning:
            log.warning("%s", seat.warning)
        if seat.size == 1:
            break
        from ddlcore.guest import Guest  # brings ZeroMQ, which a world of one does not need

        return Guest(provider.name, seat, settings, registry, environ), registry
    return None, registry
