"""Find out where this process runs: its parents' command lines, its host, and its namespace of process ids."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_MOST_PARENTS = 64


def lineage() -> list[list[str]]:
    """Return the command lines of this process's parent, of the parent's parent, and so on.

    The list ends where the system does not show any more.
    """
    found: list[list[str]] = []
    pid = os.getppid()
    while pid > 1 and len(found) < _MOST_PARENTS:
        try:
            command = (_PROC / str(pid) / "cmdline").read_bytes()
            pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        found.append(command.decode(errors="replace").rstrip("\0").split("\0"))
    return found


def host_name() -> str:
    """Return a name that is the same for all processes of this host and different on every other host.

    A network namespace counts as a host of its own: processes that cannot reach each other's sockets do not share
    memory either.
    """
    return ":".join((socket.gethostname(), _boot(), _namespace("net")))


def kin() -> str:
    """Return a name that is the same for all processes that see each other's process ids."""
    return ":".join((_boot() or socket.gethostname(), _namespace("pid")))


def _boot() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(_PROC / "self/ns" / kind)
    except OSError:
        return ""
