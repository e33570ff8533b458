"""Decide how many ranks run on which host, from ``-np``, ``-H`` and host files. Starts nothing and contacts no host."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlcore.contracts.interfaces import interface_addresses
from ddlcore.contracts.launcher import HostSlots

_HOST = r"(?P<host>([\w.-]+@)?(\[[0-9a-fA-F:.]+(%\w+)?\]|[\w.-]+))"
_ENTRY = re.compile(_HOST + r"(:(?P<slots>.*))?")
_LINE = re.compile(_HOST + r"(\s*:\s*(?P<colon>\S+)|(\s+slots\s*=\s*(?P<slots>\S+))?(\s+max[-_]slots\s*=\s*\S+)?)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Layout:
    """The assignment of ranks to hosts. A host is identified by its index in the order of the user's list."""

    hosts: tuple[str, ...]  # names as the user wrote them; only hosts that run ranks
    ranks: tuple[int, ...]  # (size,) host index of each rank
    here: int = 0  # index of the launching process's own host; -1: it runs no rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def remote_hosts(self) -> tuple[int, ...]:
        """The indexes of all hosts except the launching process's own."""
        return tuple(index for index in range(len(self.hosts)) if index != self.here)

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """Return the ranks of the host with index ``host`` in ascending order."""
        return tuple(rank for rank, theirs in enumerate(self.ranks) if theirs == host)


def parse_hosts(text: str) -> list[HostSlots]:
    """Parse ``host:slots,host:slots``. Raises ValueError, with a message of one line, for anything else."""
    entries = []
    for part in map(str.strip, text.split(",")):
        found = _ENTRY.fullmatch(part)
        if found is None:
            raise ValueError(f"-H {text}: '{part}' is not of the form HOST:SLOTS, such as localhost:4")
        if found["slots"] is None:
            raise ValueError(f"-H {text}: say how many ranks {found['host']} takes, such as {found['host']}:4")
        entries.append(HostSlots(found["host"], _slots(found["slots"], found["host"], f"-H {text}")))
    return entries


def read_hostfile(path: str) -> list[HostSlots]:
    """Read a host file with one host on each line: ``host slots=4``, ``host:4``, or a host alone, which takes one rank.

    ``#`` begins a comment. Raises ValueError for any other line, with a message of one line that contains the number of
    that line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"--hostfile {path}, line {number}"
        found = _LINE.fullmatch(content)
        if found is None:
            raise ValueError(f"{where}: '{content}' is not of the form HOST slots=N")
        entries.append(HostSlots(found["host"], _slots(found["colon"] or found["slots"] or "1", found["host"], where)))
    if not entries:
        raise ValueError(f"--hostfile {path}: it names no host; write one a line, such as: node1 slots=4")
    return entries


def _slots(text: str, host: str, where: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise ValueError(f"{where}: '{text}', the number of ranks that {host} takes, is no number")
    if int(text) < 1:
        raise ValueError(f"{where}: {host} must take at least one rank, not {text}")
    return int(text)


def is_this_host(host: str, resolve: bool = False) -> bool:
    """Return whether ``host`` is a name or an address of this machine.

    If ``resolve`` is true and the name is not known locally, it is also looked up, which may ask the network.
    """
    host = host.rpartition("@")[2].strip("[]").lower()
    own = socket.gethostname().lower()
    if host in (*_LOOPBACK, own, own.partition(".")[0]):
        return True
    mine = {address for addresses in interface_addresses().values() for address in addresses}
    if host in mine:
        return True
    if not resolve:
        return False
    try:
        return any(place[4][0] in mine for place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


def lay_out(
    ranks: int | None, entries: Sequence[HostSlots] | None, *, what: str = "-H", resolve: bool = True
) -> Layout:
    """Assign the ranks to hosts in the order of ``entries``. If ``entries`` is None, all ranks run on this host.

    Each host takes as many ranks as it has slots, before the next host is used. If ``ranks`` is None, all slots are
    used. ``what`` names the source of ``entries`` in messages, and ``resolve`` is passed to ``is_this_host``. Raises
    ValueError, with a message of one line, if there are too few slots or if a host is listed twice.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"-np {ranks}: at least one rank is needed")
    if entries is None:
        if ranks is None:
            raise ValueError("say how many ranks to start, such as -np 4")
        return Layout((socket.gethostname(),), (0,) * ranks)
    slots = sum(entry.slots for entry in entries)
    if ranks is not None and ranks > slots:
        takes = f"{slots} rank{'' if slots == 1 else 's'}"
        raise ValueError(f"-np {ranks}: too few slots, {what} takes {takes}; raise the slots or lower -np")
    here = _own(entries, what, lambda host: is_this_host(host, resolve))
    wanted = slots if ranks is None else ranks
    placed = [index for index, entry in enumerate(entries) for _ in range(entry.slots)][:wanted]
    used = placed[-1] + 1
    return Layout(tuple(entry.host for entry in entries[:used]), tuple(placed), here if here < used else -1)


def _own(entries: Sequence[HostSlots], what: str, is_own: Callable[[str], bool]) -> int:
    """Return the index of that entry which is this host, or -1. Raises ValueError if a host is listed twice."""
    seen: dict[str, str] = {}
    here = -1
    for index, entry in enumerate(entries):
        own = is_own(entry.host)
        name = "this machine" if own else entry.host.lower()
        if name in seen:
            both = f"{entry.host} stands there twice"
            if seen[name] != entry.host:
                both = f"{seen[name]} and {entry.host} are both {name if own else 'the same host'}"
            raise ValueError(f"{what}: {both}; name each host once, with all its slots")
        seen[name] = entry.host
        here = index if own else here
    return here
