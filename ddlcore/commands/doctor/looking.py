"""Run the checks on a host, this one or a recorded one, and collect what they saw. Judges nothing."""

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

from ddlcore.builtin.checks.recorded import RECORD, RecordedGpus
from ddlcore.builtin.nvml import open_nvml
from ddlcore.contracts.check import Check, HostView, Seen
from ddlcore.errors import PluginError
from ddlcore.job import VERSION
from ddlcore.launch.agents.preflight import compared_packages
from ddlcore.launch.agents.survey import versions
from ddlcore.plug.registry import Registry

RECORDED_HOST = "etc/hostname"
PATIENCE_S = 120.0  # for all checks of a rank: one that copies between all GPUs may take over a minute
_LEAST_S = 5.0  # for each of the checks that are left when that time is used up


@dataclass
class Looks:
    """What the checks of one rank saw: by name of the check, its facts, or the reason why it failed."""

    rank: int
    local_rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def load_checks(registry: Registry) -> tuple[dict[str, Check], dict[str, str]]:
    """Return two dicts by name: the checks that can be used, and for each other check the reason in one line."""
    checks: dict[str, Check] = {}
    problems: dict[str, str] = {}
    for name, provider in registry.checks.items():
        try:
            checks[name] = registry.load(provider)()
        except PluginError as error:
            problems[name] = str(error)
        else:
            checks[name].name = name  # facts and findings use the name that its provider gives it
    return checks, problems


def installed() -> dict[str, str]:
    """Return the version of each installed distribution. The key is its name in lower case with dashes."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), one.version)
    return found


def this_view(registry: Registry, environ: Mapping[str, str], rank: int = 0, local_rank: int = 0) -> HostView:
    """Return the object through which the checks of ``rank`` see this host."""
    return HostView(
        name=socket.gethostname(),
        environ=dict(environ),
        distributions=installed(),
        frameworks={name: version for name, version in versions(compared_packages(registry)).items() if version},
        gpus=open_nvml(),
        rank=rank,
        local_rank=local_rank,
        python=platform.python_version(),
        ddl=VERSION,
    )


def recorded_view(root: str, environ: Mapping[str, str], rank: int, local_rank: int) -> HostView:
    """Return the object through which checks see a host whose /proc, /sys and GPUs were copied below ``root``.

    Raises ValueError, with a message of one line, if ``root`` is no directory or its record of the GPUs cannot be read.
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
    """Run the checks that apply to this rank, and return what they saw.

    A check that raises, or does not end in time, becomes a problem of that check only. ``patience_s`` is the time for
    all checks together.
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
    """Call ``what`` in another thread, and return what it returns or raise what it raises.

    Raise _NoEnd if it does not end within ``patience_s`` seconds: a driver may hang in the kernel.
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
    """Return, by name of the check, what the check saw on all ranks, in the order of ranks.

    The facts of a check that completes another check are merged into the facts of that other check.
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
