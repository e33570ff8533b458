"""Run the checks on this host or on a recorded host, and collect the facts that the checks report. Judges nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddl_doctor.checks.recorded import RECORD, RecordedGpus
from ddl_doctor.gpu_driver import open_driver
from ddlcore.contracts.check import Check, HostView, Seen
from ddlcore.errors import PluginError
from ddlcore.launch.agents.preflight import compared_packages
from ddlcore.launch.agents.survey import versions
from ddlcore.plug.aliases import FRAMEWORKS
from ddlcore.plug.registry import Registry
from ddlcore.plug.tested import library_releases, refused_releases
from ddlcore.version import VERSION

RECORDED_HOST = "etc/hostname"
PATIENCE_S = 120.0  # for all checks of a rank together: a check that copies between all GPUs may take over a minute
_LEAST_S = 5.0  # for each of the remaining checks when PATIENCE_S is used up


@dataclass
class Looks:
    """The results of the checks on one rank, by name of the check.

    ``facts`` holds the facts of each check that succeeded, and ``problems`` the reason for each check that failed.
    """

    rank: int
    local_rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def load_checks(registry: Registry) -> tuple[dict[str, Check], dict[str, str]]:
    """Load the checks that plugins provide. Return the usable checks, and the problems of the others, both by name.

    A problem is one line of text that says why a check cannot be used.
    """
    checks: dict[str, Check] = {}
    problems: dict[str, str] = {}
    for name, provider in registry.checks.items():
        try:
            checks[name] = registry.load(provider)()
        except PluginError as error:
            problems[name] = str(error)
        else:
            checks[name].name = name  # facts and findings use the name that the check has in the registry
    return checks, problems


def installed() -> dict[str, str]:
    """Return the version of each installed distribution, by its name in lower case with dashes."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), one.version)
    return found


def this_view(registry: Registry, environ: Mapping[str, str], rank: int = 0, local_rank: int = 0) -> HostView:
    """Return the HostView through which the checks of ``rank`` read this host."""
    return HostView(
        name=socket.gethostname(),
        environ=dict(environ),
        distributions=installed(),
        frameworks={name: version for name, version in versions(compared_packages(registry)).items() if version},
        gpus=open_driver(),
        rank=rank,
        local_rank=local_rank,
        python=platform.python_version(),
        ddl=VERSION,
        untested={
            one.module: f"{one.version} is {one.differs} ({one.range})"
            for one in library_releases(registry, FRAMEWORKS)
            if one.differs
        },
        unusable=refused_releases(registry),
    )


def recorded_view(root: str, environ: Mapping[str, str], rank: int, local_rank: int) -> HostView:
    """Return the HostView through which checks read a recorded host.

    The folder ``root`` contains copies of the host's /proc and /sys, and a file about its GPUs. Raises ValueError, with
    a message of one line, if ``root`` is not a directory or the file about the GPUs cannot be read.
    """
    if not os.path.isdir(root):
        raise ValueError(f"--root {root}: there is no such directory")
    view = HostView(os.path.basename(os.path.abspath(root)), dict(environ), {}, {}, root, None, rank, local_rank)
    text, name = view.read(RECORD), view.read(RECORDED_HOST).strip()
    gpus = None
    if text:
        try:
            gpus = RecordedGpus.read(text)
        except ValueError as error:
            raise ValueError(f"--root {root}: {error}") from None
    return HostView(name or view.name, view.environ, {}, {}, root, gpus, rank, local_rank)


def look(checks: Mapping[str, Check], view: HostView, patience_s: float = PATIENCE_S) -> Looks:
    """Run the checks that apply to the rank of ``view``, and return their facts and problems.

    Some checks run only on the first rank of a host. ``patience_s`` is the time for all checks together. If a check
    raises an exception or does not end within the remaining time, this is recorded as the problem of that check, and
    the other checks still run.
    """
    looks = Looks(view.rank, view.local_rank)
    deadline_s = time.monotonic() + patience_s
    for name, check in checks.items():
        if check.each_rank or view.local_rank == 0:
            left_s = max(min(_LEAST_S, patience_s), deadline_s - time.monotonic())
            try:
                looks.facts[name] = _ended(partial(check.look, view), left_s)
            except _NoEnd:
                looks.problems[name] = f"rank {view.rank}: it did not end within {left_s:.3g} s"
            except Exception as error:  # plugin code may raise anything: the other checks continue
                looks.problems[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return looks


class _NoEnd(Exception):
    pass


def _ended(what: Callable[[], Any], patience_s: float) -> Any:
    """Call ``what`` in another thread. Return its result, or raise its exception.

    Raise _NoEnd if the call does not end within ``patience_s`` seconds, because a driver may hang in the kernel.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(what())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ddl-doctor-look", daemon=True).start()
    if not wait([future], patience_s).done:
        raise _NoEnd
    return future.result()


def put_together(
    checks: Mapping[str, Check], looks: Sequence[Looks], host_of: Callable[[int], str]
) -> dict[str, list[Seen]]:
    """Return the facts of all ranks by name of the check, in the order of the ranks.

    Some checks complete another check: their facts are merged into the facts of the other check. ``host_of`` returns
    the name of the host of a rank.
    """
    seen: dict[str, list[Seen]] = {}
    for one in sorted(looks, key=lambda one: one.rank):
        facts = dict(one.facts)
        for name, check in checks.items():
            if check.completes and name in facts:
                more = facts.pop(name)
                if isinstance(facts.get(check.completes), dict) and isinstance(more, dict):
                    facts[check.completes] = {**facts[check.completes], **more}
        for name, fact in facts.items():
            seen.setdefault(name, []).append(Seen(host_of(one.rank), one.rank, one.local_rank, fact))
    return seen
