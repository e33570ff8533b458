"""Find Gloo's connections among the file descriptors of this process, and cut them, because Gloo itself cannot.

Gloo's ``abort`` has no effect, and a thread that waits in Gloo does not react to signals. But Gloo's sockets are file
descriptors of this process. If a socket is shut down, the threads that read from the socket wake up.
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
_LOOK_S, _ALIKE = 0.01, 3  # time between two reads of the counts; no bytes are on their way after 3 equal results

# A thread that reads sockets has duplicates of their descriptors. Another thread could take these for Gloo's own
# descriptors, so only one thread at a time may do so.
_looking = threading.RLock()


def _unlocked() -> None:
    """Replace the lock in a forked process. A thread that does not exist in this process may hold the old lock."""
    global _looking
    _looking = threading.RLock()


os.register_at_fork(after_in_child=_unlocked)


class Wires:
    """The sockets of one Gloo group, identified by descriptor number and inode.

    This object does not keep duplicates of the descriptors. So if Gloo closes a socket, the socket is really closed.
    """

    def __init__(self, said: Sequence[bytes], heard: Sequence[bytes]) -> None:
        """Find the group's connections.

        ``said`` holds the values that this rank has published for Gloo, and ``heard`` holds the values of all ranks.
        Each rank publishes the address at which it listens, in the system's binary form. A socket is one of the group's
        connections if its local address is the listening address of this rank, or if its remote address is the
        listening address of another rank.
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
        """Return the number of connections that were found."""
        return len(self._wires)

    def held(self) -> int:
        """Return the number of connections that Gloo has not closed yet."""
        count = 0
        for number, inode in self._wires.items():
            with contextlib.suppress(OSError):
                count += os.fstat(number).st_ino == inode
        return count

    def calm(self, patience_s: float) -> None:
        """Wait until no bytes are on their way in either direction, but at most ``patience_s`` seconds.

        Gloo's threads finish every message that has begun, even if no thread waits for the message. If a connection is
        cut in the middle of a message, Gloo waits forever for the rest of the message.
        """
        until_s = time.monotonic() + patience_s
        before, alike = self._traffic(), 0
        while alike < _ALIKE and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            now = self._traffic()
            alike = alike + 1 if now == before and not any(queued for _, queued in now) else 0
            before = now

    def _traffic(self) -> list[tuple[bytes, int]]:
        """Return a pair for each connection: the counters of traffic sent and received, and the number of queued bytes.

        The counters are a ``bytes`` object, as the kernel returned it. The object is not decoded, because it is only
        compared with earlier ones.
        """
        found = []
        for number, inode in self._wires.items():
            with _taken(number, inode) as wire, contextlib.suppress(OSError):
                if wire is not None:
                    counts = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTED.stop)[_COUNTED]
                    found.append((counts, _queued(wire, termios.FIONREAD) + _queued(wire, termios.TIOCOUTQ)))
        return found

    def cut(self) -> None:
        """Shut down every connection. The processes at both ends notice this at once. Any thread may call this."""
        for number, inode in self._wires.items():
            with _taken(number, inode) as wire, contextlib.suppress(OSError):
                if wire is not None:
                    wire.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close the connections in a forked process. The same connections of the parent process stay open.

        Call this method only in a forked process in which no other thread runs.
        """
        for number, inode in self._wires.items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)


@contextlib.contextmanager
def _taken(number: int, inode: int = 0) -> Iterator[socket.socket | None]:
    """Yield a socket object for the descriptor ``number``, or None if ``number`` is not a TCP socket.

    The object uses a duplicate of the descriptor, which is closed at the end of the ``with`` block. If ``inode`` is not
    0, None is yielded for a socket with another inode. Gloo may have closed its descriptor, so that the number now
    belongs to another file.
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
        except OSError:  # not an open socket, but only its path (O_PATH); the control network opens such descriptors
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
    """Return a socket's address ``name`` as bytes: the struct sockaddr_in or sockaddr_in6, without the scope."""
    if len(name) == 2:
        return (
            struct.pack("=H", socket.AF_INET) + struct.pack(">H", name[1]) + socket.inet_pton(socket.AF_INET, name[0])
        )
    address = socket.inet_pton(socket.AF_INET6, name[0].partition("%")[0])
    return struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", name[1], name[2]) + address
