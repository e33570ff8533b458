"""Find out whether a host has everything that a job needs, such as files, a program and free ports.

This module starts no process. It finds the versions of packages without importing the packages.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Iterable

from ddlcore.contracts.interfaces import chosen_address, route_address
from ddlcore.control.ports import free_ports, is_free
from ddlcore.launch.agents.wire import Look, Report
from ddlcore.launch.ranks.environment import usable_cores
from ddlcore.version import VERSION


def survey(look: Look, endpoint: str) -> Report:
    """Change to the job's directory, and return the report on this host that the request ``look`` asks for.

    ``endpoint`` is the endpoint at which the launcher listens.
    """
    problems = []
    try:
        os.chdir(look.directory)
    except OSError as error:
        problems.append(f"{look.directory}, the directory of the job: {error.strerror}")
    else:
        problems += [f"{path}: no such file (looked in {look.directory})" for path in _missing(look.files)]
    if look.program and shutil.which(look.program) is None:
        problems.append(f"{look.program}: no such program")
    address = ""
    try:
        address = _address(look.network_interface, endpoint)
    except ValueError as error:
        problems.append(str(error))
    ports: tuple[int, ...] = ()
    try:
        ports = tuple(free_ports(look.ports, avoid=(look.port,)))
    except OSError as error:
        problems.append(str(error))
    if look.port and not is_free(look.port):
        problems.append(f"port {look.port} (MASTER_PORT) is taken; unset it and a free one is chosen")
    return Report(
        host=socket.gethostname(),
        python=platform.python_version(),
        ddl=VERSION,
        packages=versions(look.packages),
        address=address,
        cores=usable_cores(),
        ports=ports,
        problems=tuple(problems),
    )


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return, for each of ``packages``, the version that is installed here, or "" if the package is not installed.

    Reads only the metadata of the packages.
    """
    found = dict.fromkeys(packages, "")
    for name in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def endpoint_host(endpoint: str) -> str:
    """Return the IP address in ``endpoint`` (``tcp://IP:PORT``), without brackets. Return "" for an ipc endpoint."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]") if endpoint.startswith("tcp:") else ""


def _missing(files: Iterable[str]) -> list[str]:
    return [path for path in files if not os.path.exists(path)]


def _address(interface: str, endpoint: str) -> str:
    launcher = endpoint_host(endpoint)
    if not launcher:
        return ""
    return chosen_address(interface, launcher) if interface else route_address(launcher)
