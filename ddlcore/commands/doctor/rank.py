"""Run one rank of the doctor: run the checks, then take part in the measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import ddlcore.api as ddl
from ddlcore.commands.doctor.links import Links, chosen_ranks
from ddlcore.commands.doctor.looking import Looks, load_checks, look, this_view
from ddlcore.config import Environment
from ddlcore.errors import DeadlineExceeded
from ddlcore.plug.settings import settings_of


@dataclass
class Told:
    """The report of one rank to the doctor."""

    looks: Looks
    checks: dict[str, str] = field(default_factory=dict)  # by check, why it could not be used there
    links: Links | None = None
    error: str = ""  # why nothing was measured
    cores: tuple[int, ...] = ()  # numbers of the cores that the rank may use; (): unknown


def doctor_rank(measures: bool, wanted: tuple[str, ...], environ: Mapping[str, str] | None = None) -> Told:
    """Run the checks on this rank, then measure the links if ``measures`` is true, and return the report.

    ``wanted`` names the transports to measure; () means all.
    """
    environ = os.environ if environ is None else environ
    environment = Environment.read(environ)
    assert environment is not None, "it is started by the doctor"
    _, registry = settings_of(environ)
    place = environment.placement
    checks, unusable = load_checks(registry)
    told = Told(look(checks, this_view(registry, environ, place.rank, place.local_rank)), unusable)
    if hasattr(os, "sched_getaffinity"):
        told.cores = tuple(sorted(os.sched_getaffinity(0)))
    if not measures:
        return told
    try:
        from ddlcore.commands.doctor.pairs import measure_links, pair_transports

        ddl.init()
        try:
            transports = pair_transports(registry, wanted, environment.launcher)
            told.links = measure_links(ddl.current_job(), transports, chosen_ranks(place.hosts))
        finally:
            ddl.shutdown()
    except DeadlineExceeded:  # another rank hangs: only a failure of this rank makes the launcher end it
        raise
    except Exception as error:  # report what the checks saw in any case
        told.error = f"{type(error).__name__}: {error}".partition("\n")[0]
    return told
