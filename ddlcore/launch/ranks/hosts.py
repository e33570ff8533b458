"""Decide how many ranks run on which host, by the flags ``-np`` and ``-H`` and host files.

This module starts no process and contacts no host.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlcore.contracts.interfaces import interface_addresses
from ddlcore.contracts.launcher import HostSlots
from ddlcore.messages.ranks import LaunchedRank

_HOST = r"(?P<host>([\w.-]+@)?(\[[0-9a-fA-F:.]+(%\w+)?\]|[\w.-]+))"
_ENTRY = re.compile(_HOST + r"(:(?P<slots>.*))?")
_LINE = re.compile(_HOST + r"(\s*:\s*(?P<colon>\S+)|(\s+slots\s*=\s*(?P<slots>\S+))?(\s+max[-_]slots\s*=\s*\S+)?)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Layout:
    """The assignment of ranks to hosts. A host index is the position of the host in the user's list of hosts."""

    hosts: tuple[str, ...]  # names as the user wrote them; only hosts that run ranks
    ranks: tuple[int, ...]  # (size,) host index of each rank
    here: int = 0  # index of the launching process's own host; -1: this host runs no rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def remote_hosts(self) -> tuple[int, ...]:
        """The indexes of all hosts except the host of the launching process."""
        return tuple(index for index in range(len(self.hosts)) if index != self.here)

    def ranks_of(self, host: int) -> tuple[LaunchedRank, ...]:
        """Return the ranks of the host with index ``host`` in ascending order."""
        return tuple(LaunchedRank(rank) for rank, theirs in enumerate(self.ranks) if theirs == host)


def parse_hosts(text: str) -> list[HostSlots]:
    """Return the hosts and slots in ``text``, the value of ``-H``, which has the form ``host:slots,host:slots``.

    Raises ValueError, with a message of one line, if ``text`` has another form.
    """
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
    """Return the hosts and slots in the host file ``path``.

    Each line of the file has one host: ``host slots=4``, ``host:4``, or only ``host``, which means one slot. ``#``
    begins a comment. Raises ValueError for a line of another form, with a message of one line that contains the line
    number. Also raises ValueError if the file cannot be read or names no host.
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

    If ``resolve`` is true and ``host`` is not one of this machine's own names and addresses, also look up the addresses
    of ``host``. This may contact a name server.
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
    """Assign ``ranks`` ranks to the hosts in ``entries``, in the order of ``entries``.

    Each host gets as many ranks as it has slots before the next host is used. If ``ranks`` is None, all slots are used.
    If ``entries`` is None, all ranks run on this host. ``what`` names the source of ``entries``; error messages contain
    it. ``resolve`` is the argument for ``is_this_host``. Raises ValueError, with a message of one line, if there are
    too few slots, if a host is listed twice, or if the number of ranks is missing or below 1.
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
    here = index_of_this_host(entries, what, resolve)
    wanted = slots if ranks is None else ranks
    placed = [index for index, entry in enumerate(entries) for _ in range(entry.slots)][:wanted]
    used = placed[-1] + 1
    return Layout(tuple(entry.host for entry in entries[:used]), tuple(placed), here if here < used else -1)


def index_of_this_host(entries: Sequence[HostSlots], what: str, resolve: bool = False) -> int:
    """Return the index of this host in ``entries``, or -1 if this host is not in the list.

    ``what`` is the name of the list in messages. ``resolve`` is the argument for ``is_this_host``. Raises ValueError if a
    host is listed twice.
    """
    seen: dict[str, str] = {}
    here = -1
    for index, entry in enumerate(entries):
        own = is_this_host(entry.host, resolve)
        name = "this machine" if own else entry.host.lower()
        if name in seen:
            both = f"{entry.host} stands there twice"
            if seen[name] != entry.host:
                both = f"{seen[name]} and {entry.host} are both {name if own else 'the same host'}"
            raise ValueError(f"{what}: {both}; name each host once, with all its slots")
        seen[name] = entry.host
        here = index if own else here
    return here
