"""The connections of one group, found among the process's descriptors: so they can be cut, which Gloo cannot do.

Gloo's ``abort`` does nothing, and a thread that waits in it hears of no signal; but its sockets are the process's,
and what is shut down wakes who reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Wires"]

_DESCRIPTORS = "/proc/self/fd"
_COUNTED = slice(120, 136)  # tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (Linux 4.1 and later)
_LOOK_S, _ALIKE = 0.01, 3  # nothing is on its way where so many looks in a row find the same

_looking = threading.RLock()  # who looks holds descriptors for a moment that another's look would take for Gloo's


def _unlocked() -> None:
    """In a forked process: who held it is not there."""
    global _looking
    _looking = threading.RLock()


os.register_at_fork(after_in_child=_unlocked)


class Wires:
    """Knows Gloo's sockets by number and inode. Holds none of them, so that whoever closes one has closed it."""

    def __init__(self, said: Sequence[bytes], heard: Sequence[bytes]) -> None:
        """``said`` is what this rank has published for the others, ``heard`` what the ranks have.

        Gloo publishes where a rank listens, as the system writes addresses. A connection of this rank's has
        its listener at the near end, or another's at the far end.
        """
        mine, others = b"".join(said), b"\0".join(heard)
        self._wires: dict[int, int] = {}  # Gloo's descriptor, and the inode that it stands for
        with _looking:
            for number in map(int, os.listdir(_DESCRIPTORS)):
                with _taken(number) as wire, contextlib.suppress(OSError):  # not connected, or no longer
                    if wire is not None and _is_between(wire.getsockname(), wire.getpeername(), mine, others):
                        self._wires[number] = os.fstat(wire.fileno()).st_ino
                        os.set_inheritable(number, False)  # what is started meanwhile needs none of them

    def __len__(self) -> int:
        """How many were found."""
        return len(self._wires)

    def held(self) -> int:
        """How many of them Gloo has not closed."""
        count = 0
        for number, inode in self._wires.items():
            with contextlib.suppress(OSError):
                count += os.fstat(number).st_ino == inode
        return count

    def calm(self, patience_s: float) -> None:
        """Returns when nothing is on its way, in either direction, or after ``patience_s``.

        Gloo's threads send and receive whatever was begun, whoever waits for it. Cut in its midst, a message
        would be waited for without end.
        """
        until_s = time.monotonic() + patience_s
        before, alike = self._traffic(), 0
        while alike < _ALIKE and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            now = self._traffic()
            alike = alike + 1 if now == before and not any(queued for _, queued in now) else 0
            before = now

    def _traffic(self) -> list[tuple[bytes, int]]:
        """By connection, the counts of bytes that came and went, and how many lie in the system's queues."""
        found = []
        for number, inode in self._wires.items():
            with _taken(number, inode) as wire, contextlib.suppress(OSError):
                if wire is not None:
                    counts = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTED.stop)[_COUNTED]
                    found.append((counts, _queued(wire, termios.FIONREAD) + _queued(wire, termios.TIOCOUTQ)))
        return found

    def cut(self) -> None:
        """Ends every connection, at both ends, at once. From any thread."""
        for number, inode in self._wires.items():
            with _taken(number, inode) as wire, contextlib.suppress(OSError):
                if wire is not None:
                    wire.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """In a forked process, where no other thread runs: closes its copies, which leaves the parent's as they are."""
        for number, inode in self._wires.items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)


@contextlib.contextmanager
def _taken(number: int, inode: int = 0) -> Iterator[socket.socket | None]:
    """A TCP socket by a descriptor of our own, for the moment; None for anything else.

    ``inode``: only if it is that one. Gloo may have closed its descriptor, and the number be another's by now.
    """
    with _looking:
        try:
            own = os.dup(number)
        except OSError:  # closed meanwhile
            yield None
            return
        status = os.fstat(own)
        if not stat.S_ISSOCK(status.st_mode) or inode not in (0, status.st_ino):
            os.close(own)
            yield None
            return
        try:
            found = socket.socket(fileno=own)
        except OSError:  # a descriptor of a socket's path (O_PATH), as the control network holds one, is no socket
            os.close(own)
            yield None
            return
        with found:
            tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            yield found if tcp else None


def _queued(wire: socket.socket, which: int) -> int:
    count: int
    (count,) = struct.unpack("=i", fcntl.ioctl(wire, which, b"\0\0\0\0"))
    return count


def _is_between(near: Any, far: Any, mine: bytes, others: bytes) -> bool:
    return _raw(near) in mine or _raw(far) in others


def _raw(name: Any) -> bytes:
    """A socket's name as sockaddr_in(6) has it, up to the scope."""
    if len(name) == 2:
        return (
            struct.pack("=H", socket.AF_INET) + struct.pack(">H", name[1]) + socket.inet_pton(socket.AF_INET, name[0])
        )
    address = socket.inet_pton(socket.AF_INET6, name[0].partition("%")[0])
    return struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", name[1], name[2]) + address
