"""Find out where this process runs: the command lines of its parent processes, its host, and its pid namespace."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_MOST_PARENTS = 64


def lineage() -> list[list[str]]:
    """Return the command lines of this process's parent, of the parent's parent, and so on, each as a list of words.

    The list does not contain process 1. It ends after 64 processes, or before a process that the system does not show.
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

    Each network namespace counts as a separate host. So processes that cannot reach each other's sockets are on
    different hosts for ddl, and do not use shared memory together.
    """
    return ":".join((socket.gethostname(), _boot(), _namespace("net")))


def kin() -> str:
    """Return a name that is the same for all processes that can see each other's process ids.

    These are the processes in one pid namespace of one host.
    """
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
