"""Check the arguments of ``ddlcore.run``, and translate those that only Horovod's ``run`` has."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence

from ddlcore.config import Settings
from ddlcore.launch.job.horovod import read_keywords
from ddlcore.launch.job.launcher import check_route
from ddlcore.launch.job.placement import Placed, check_elastic, find_discovery, place
from ddlcore.plug.registry import Registry

_CALLER = 4  # stack level of the caller of ``run``, from a function here that calls ``_warn``


def check_call(func: object, args: object, kwargs: object, executable: str | None) -> None:
    """Raise ValueError if ``func(*args, **kwargs)`` cannot be called in other processes of this interpreter."""
    if not callable(func):
        raise ValueError(f"run: func is of type {type(func).__name__}; pass a function")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ValueError(f"run: args is of type {type(args).__name__}; pass a tuple, such as args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"run: kwargs is of type {type(kwargs).__name__}; pass a dict")
    if executable is not None and os.path.abspath(executable) != os.path.abspath(sys.executable):
        raise ValueError(
            f"run: executable={executable!r}: the ranks run {sys.executable}, the interpreter of this process, for which "
            "func is pickled. Leave it out and start this script with the other interpreter, or use `ddl run`"
        )


def number_of_ranks(
    num_proc: int | None, np: int | None, hosts: str | None, hostfile: str | None, discovery: str | None = None
) -> int | None:
    """Return how many ranks the arguments ask for. None stands for all slots of the hosts.

    ``num_proc`` and ``np`` are two names of the same argument. Raises ValueError if they contradict each other or the
    hosts.
    """
    if np is not None:
        if num_proc is not None and num_proc != np:
            raise ValueError(f"run: np={np} and num_proc={num_proc} say different things; pass num_proc alone")
        _warn("np is deprecated; pass num_proc", DeprecationWarning)
        num_proc = np
    if num_proc is None and hosts is None and hostfile is None and not discovery:
        num_proc = 2
    if num_proc is not None and (isinstance(num_proc, bool) or not isinstance(num_proc, int)):
        raise ValueError(f"run: num_proc is of type {type(num_proc).__name__}; pass a whole number")
    return num_proc


def settings_from(horovod: Mapping[str, object]) -> dict[str, object]:
    """Return the settings for which keywords of ``horovod.run`` stand.

    Warns about those that have no effect. Raises ValueError for those that cannot be served, and for bad values.
    """
    if horovod["use_gloo"] and horovod["use_mpi"]:
        raise ValueError("run: use_gloo and use_mpi name different transports; pass one of them, or backend=")
    try:
        answers = read_keywords(horovod)
    except ValueError as error:
        raise ValueError(f"run: {error}") from None
    if answers.refusals:
        raise ValueError(f"run: {answers.refusals[0]}")
    for note in answers.notes:
        _warn(note, UserWarning)
    return answers.settings


def given(settings: Mapping[str, object]) -> dict[str, object]:
    """Return those of ``settings`` whose value is not None."""
    return {name: value for name, value in settings.items() if value is not None}


def joined(names: str | Sequence[str] | None) -> str | None:
    """Return ``names``, a text or several texts, as one text with commas; None if there are none."""
    return names if names is None or isinstance(names, str) else ",".join(names)


def placed_on(
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    settings: Settings,
    registry: Registry,
    environ: Mapping[str, str],
) -> Placed:
    """Return where ``ranks`` run, as ``place`` does. Raises ValueError if the transport cannot serve them there."""
    if hosts is not None and hostfile is not None:
        raise ValueError("run: hosts and hostfile both say where; pass one of them")
    discovery = find_discovery(settings, registry, environ)
    placed = place(ranks, hosts, hostfile, settings, registry, environ, discovery)
    route = check_route(settings.text("backend"), placed.layout.ranks, registry, placed.launcher)
    check_elastic(settings, placed.layout.size, route)
    return placed


def _warn(text: str, category: type[Warning]) -> None:
    warnings.warn(f"run: {text}", category, stacklevel=_CALLER)
