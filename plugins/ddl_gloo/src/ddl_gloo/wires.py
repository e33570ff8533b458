"""The connections of one group, found among the process's descriptors: so they can be cut, which Gloo cannot do.

Gloo's ``abort`` does nothing, and a thread that waits in it hears of no signal; but its sockets are the process's,
and what is shut down wakes who reads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["Wires"]

_DESCRIPTORS = "/proc/self/fd"


class Wires:
    """Descriptors of our own to the same sockets, so that no number is another's by the time it is used."""

    def __init__(self, said: Sequence[bytes], heard: Sequence[bytes]) -> None:
        """``said`` is what this rank has published for the others, ``heard`` what the ranks have.

        Gloo publishes where a rank listens, as the system writes addresses. A connection of this rank's has
        its listener at the near end, or another's at the far end.
        """
        mine, others = b"".join(said), b"\0".join(heard)
        self._wires: list[tuple[int, socket.socket]] = []  # Gloo's descriptor, and ours
        for name in os.listdir(_DESCRIPTORS):
            wire = _connection(int(name))
            if wire is None:
                continue
            if _raw(wire.getsockname()) in mine or _raw(wire.getpeername()) in others:
                self._wires.append((int(name), wire))
                with contextlib.suppress(OSError):
                    os.set_inheritable(int(name), False)  # what is started meanwhile needs none of them
            else:
                wire.close()

    def __len__(self) -> int:
        return len(self._wires)

    def cut(self) -> None:
        """Ends every connection, at both ends, at once. From any thread."""
        for _, wire in list(self._wires):
            with contextlib.suppress(OSError):  # gone already
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of them; Gloo's own stay as they are."""
        while self._wires:
            self._wires.pop()[1].close()

    def drop(self) -> None:
        """In a forked process: closes this process's copies, Gloo's too, and so leaves the parent's alone in the world."""
        for number, wire in self._wires:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == os.fstat(wire.fileno()).st_ino:
                    os.close(number)
        self.close()


def _connection(number: int) -> socket.socket | None:
    """A connected TCP socket by a descriptor of our own; None for anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        own = os.dup(number)
    except OSError:  # closed meanwhile
        return None
    found = socket.socket(fileno=own)
    with contextlib.suppress(OSError):
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            found.getpeername()
            return found
    found.close()
    return None


def _raw(name: Any) -> bytes:
    """A socket's name as sockaddr_in(6) has it, up to the scope."""
    if len(name) == 2:
        return (
            struct.pack("=H", socket.AF_INET) + struct.pack(">H", name[1]) + socket.inet_pton(socket.AF_INET, name[0])
        )
    address = socket.inet_pton(socket.AF_INET6, name[0].partition("%")[0])
    return struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", name[1], name[2]) + address
