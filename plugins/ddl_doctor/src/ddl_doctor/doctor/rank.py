"""Run one rank of ``ddl doctor``: run the checks, then take part in the measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import ddlcore.api as ddl
from ddl_doctor.doctor.links import MeasuredLinks, chosen_ranks
from ddl_doctor.doctor.looking import Looks, load_checks, look, this_view
from ddlcore.errors import DeadlineExceeded
from ddlcore.plug.settings import settings_of
from ddlcore.process.environment import Environment


@dataclass
class RankAnswer:
    """The report that one rank returns to ``ddl doctor``."""

    looks: Looks
    checks: dict[str, str] = field(default_factory=dict)  # name of a check that could not be loaded there -> reason
    links: MeasuredLinks | None = None
    error: str = ""  # the reason why nothing was measured
    cores: tuple[int, ...] = ()  # numbers of the cores that the rank may use; (): unknown


def doctor_rank(measures: bool, wanted: tuple[str, ...], environ: Mapping[str, str] | None = None) -> RankAnswer:
    """Run the checks on this rank, then measure the links if ``measures`` is true, and return the rank's report.

    ``wanted`` holds the names of the transports to measure; () means all that can be used. ``environ`` holds the
    environment variables; None means those of this process.
    """
    environ = os.environ if environ is None else environ
    environment = Environment.read(environ)
    assert environment is not None, "it is started by the doctor"
    _, registry = settings_of(environ)
    place = environment.placement
    checks, unusable = load_checks(registry)
    told = RankAnswer(look(checks, this_view(registry, environ, place.rank, place.local_rank)), unusable)
    if hasattr(os, "sched_getaffinity"):
        told.cores = tuple(sorted(os.sched_getaffinity(0)))
    if not measures:
        return told
    try:
        from ddl_doctor.doctor.pairs import measure_links, pair_transports

        ddl.init()
        try:
            transports = pair_transports(registry, wanted, environment.launcher)
            told.links = measure_links(ddl.current_job(), transports, chosen_ranks(place.hosts))
        finally:
            ddl.shutdown()
    except DeadlineExceeded:  # another rank hangs; the launcher ends that rank only if this rank fails
        raise
    except Exception as error:  # return the facts of the checks in any case
        told.error = f"{type(error).__name__}: {error}".partition("\n")[0]
    return told
