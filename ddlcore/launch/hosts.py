"""Decides how many ranks run where, from ``-np`` and ``-H``; it starts nothing and resolves no name by network."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

__all__ = ["HostSlots", "is_this_host", "parse_hosts", "place"]

_ENTRY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)(:(?P<slots>\d+))?")
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


@dataclass(frozen=True)
class HostSlots:
    """A host, and how many ranks it takes."""

    host: str
    slots: int


def parse_hosts(text: str) -> list[HostSlots]:
    """``host:slots,host:slots``. Raises ValueError in one line for anything else."""
    entries = []
    for part in text.split(","):
        found = _ENTRY.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"-H {text}: '{part.strip()}' is not of the form HOST:SLOTS, such as localhost:4")
        if found["slots"] is None:
            raise ValueError(f"-H {text}: say how many ranks {found['host']} takes, such as {found['host']}:4")
        if int(found["slots"]) < 1:
            raise ValueError(f"-H {text}: {found['host']} must take at least one rank")
        entries.append(HostSlots(found["host"], int(found["slots"])))
    return entries


def is_this_host(host: str) -> bool:
    """Whether ``host`` is a name of this machine that needs no look-up."""
    own = socket.gethostname().lower()
    return host.lower() in (*_LOOPBACK, own, own.partition(".")[0])


def place(ranks: int | None, hosts: str | None) -> tuple[int, ...]:
    """The host index of each rank, (size,). Raises ValueError where that cannot be met.

    ``ranks`` None: as many as ``hosts`` takes. ``hosts`` None: all of them here, however many.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"-np {ranks}: at least one rank is needed")
    if hosts is None:
        if ranks is None:
            raise ValueError("say how many ranks to start, such as -np 4")
        return (0,) * ranks
    entries = parse_hosts(hosts)
    for entry in entries:
        if not is_this_host(entry.host):
            raise ValueError(
                f"-H {hosts}: {entry.host} is not this machine, and this release starts ranks on one host only; "
                "use -H localhost:N (launching across hosts comes with the multi-host release)"
            )
    slots = sum(entry.slots for entry in entries)
    if ranks is not None and ranks > slots:
        what = f"{slots} rank{'' if slots == 1 else 's'}"
        raise ValueError(f"-np {ranks}: too few slots, -H {hosts} takes {what}; raise the slots or lower -np")
    return (0,) * (slots if ranks is None else ranks)
