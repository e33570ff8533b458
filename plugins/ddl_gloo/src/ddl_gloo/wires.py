"""Finds the connections of one group among the process's file descriptors, in order to cut them. Gloo cannot cut them.

Gloo's ``abort`` has no effect, and a thread that waits in Gloo does not react to signals. But Gloo's sockets belong to
the process, and shutting a socket down wakes the threads that read from it.
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

_DESCRIPTORS = "/proc/self/fd"
_COUNTED = slice(120, 136)  # tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (Linux 4.1 and later)
_LOOK_S, _ALIKE = 0.01, 3  # the pause between looks; that many equal ones in a row mean that nothing is on its way

# While a thread looks, it holds duplicates of descriptors, which another thread's look would mistake for Gloo's.
_looking = threading.RLock()


def _unlocked() -> None:
    """Replace the lock in a forked process, because the thread that held it does not exist there."""
    global _looking
    _looking = threading.RLock()


os.register_at_fork(after_in_child=_unlocked)


class Wires:
    """The sockets of one Gloo group, known by descriptor number and inode.

    This object holds no duplicates of them, so a socket that Gloo closes is really closed.
    """

    def __init__(self, said: Sequence[bytes], heard: Sequence[bytes]) -> None:
        """Find the group's connections.

        ``said`` is what this rank has published for the others, and ``heard`` is what all ranks have published. In
        Gloo, a rank publishes the address at which it listens, in the system's binary form. A socket is one of the
        group's connections if its own address is this rank's listening address, or its peer's address is another rank's
        listening address.
        """
        mine, others = b"".join(said), b"\0".join(heard)
        self._wires: dict[int, int] = {}  # Gloo's descriptors and their inodes
        with _looking:
            for number in map(int, os.listdir(_DESCRIPTORS)):
                with _taken(number) as wire, contextlib.suppress(OSError):  # not connected, or not any more
                    if wire is not None and _is_between(wire.getsockname(), wire.getpeername(), mine, others):
                        self._wires[number] = os.fstat(wire.fileno()).st_ino
                        os.set_inheritable(number, False)  # child processes do not need it

    def __len__(self) -> int:
        """Return how many connections were found."""
        return len(self._wires)

    def held(self) -> int:
        """Return how many of the connections Gloo has not closed yet."""
        count = 0
        for number, inode in self._wires.items():
            with contextlib.suppress(OSError):
                count += os.fstat(number).st_ino == inode
        return count

    def calm(self, patience_s: float) -> None:
        """Wait until no bytes are on their way in either direction, for at most ``patience_s``.

        Gloo's threads send and receive every message that was begun, even if nobody waits for it. If the connection is
        cut in the middle of a message, Gloo waits for that message forever.
        """
        until_s = time.monotonic() + patience_s
        before, alike = self._traffic(), 0
        while alike < _ALIKE and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            now = self._traffic()
            alike = alike + 1 if now == before and not any(queued for _, queued in now) else 0
            before = now

    def _traffic(self) -> list[tuple[bytes, int]]:
        """Return, for each connection, its counts of bytes sent and received, and how many bytes are queued."""
        found = []
        for number, inode in self._wires.items():
            with _taken(number, inode) as wire, contextlib.suppress(OSError):
                if wire is not None:
                    counts = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTED.stop)[_COUNTED]
                    found.append((counts, _queued(wire, termios.FIONREAD) + _queued(wire, termios.TIOCOUTQ)))
        return found

    def cut(self) -> None:
        """Shut every connection down, so that both ends notice it at once. Any thread may call this."""
        for number, inode in self._wires.items():
            with _taken(number, inode) as wire, contextlib.suppress(OSError):
                if wire is not None:
                    wire.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close this process's copies of the connections; the parent's stay open.

        This is for a forked process, in which no other thread runs.
        """
        for number, inode in self._wires.items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)


@contextlib.contextmanager
def _taken(number: int, inode: int = 0) -> Iterator[socket.socket | None]:
    """Yield a TCP socket on a duplicate of the descriptor ``number`` for a short time; yield None for anything else.

    ``inode``: if it is not 0, yield the socket only if it has that inode. Gloo may have closed its descriptor, and the
    number may belong to another file now.
    """
    with _looking:
        try:
            own = os.dup(number)
        except OSError:  # closed in the meantime
            yield None
            return
        status = os.fstat(own)
        if not stat.S_ISSOCK(status.st_mode) or inode not in (0, status.st_ino):
            os.close(own)
            yield None
            return
        try:
            found = socket.socket(fileno=own)
        except OSError:  # not a socket, but the path of one (O_PATH), as the control network has
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
    """Return a socket's address in the form of struct sockaddr_in or sockaddr_in6, without the scope."""
    if len(name) == 2:
        return (
            struct.pack("=H", socket.AF_INET) + struct.pack(">H", name[1]) + socket.inet_pton(socket.AF_INET, name[0])
        )
    address = socket.inet_pton(socket.AF_INET6, name[0].partition("%")[0])
    return struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", name[1], name[2]) + address
