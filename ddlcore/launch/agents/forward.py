"""Send the output of an agent's ranks to the launcher, and pass input from the launcher to the rank that reads it."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
from collections import deque
from collections.abc import Callable

from ddlcore.control.wake import Wake
from ddlcore.launch.agents.wire import CHUNK_BYTES, Credit
from ddlcore.messages.ranks import LaunchedRank

_LEFT_BYTES = 4 << 20  # limit for reading at the end, more than a pipe holds: another process may write without end
_STREAMS = ("stdout", "stderr")


class Forward:
    """A thread that reads the pipes of all ranks of an agent and sends the output of the ranks to the launcher.

    If no credit is left, because the launcher has not acknowledged enough bytes, the thread stops reading. The ranks
    must then wait as soon as their pipes are full.
    """

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ)
        self._open: dict[int, tuple[int, str]] = {}
        self._again: deque[tuple[LaunchedRank, int, int]] = deque()  # rank, stdout, stderr
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ddl-forward", daemon=True)

    def add(self, rank: LaunchedRank, stdout: int, stderr: int) -> None:
        """Register the reading ends of a rank's pipes. This object will read and close them.

        ``stdout`` and ``stderr`` are file descriptors. Call this before ``start``, or in this object's thread.
        """
        for name, fd in zip(_STREAMS, (stdout, stderr)):
            os.set_blocking(fd, False)
            self._open[fd] = (rank, name)
            self._selector.register(fd, selectors.EVENT_READ)

    def add_again(self, rank: LaunchedRank, stdout: int, stderr: int) -> None:
        """Register the pipes of a new process of ``rank``, whose earlier process has ended.

        Unlike ``add``, this may be called after ``start``, by any thread.
        """
        self._again.append((rank, stdout, stderr))
        self._wake.set()

    def start(self) -> None:
        """Start the thread. Call this only once."""
        self._thread.start()

    def drain(self) -> None:
        """Send the data that is left in the pipes of the ranks, which have ended, and end the thread.

        Waits for credit as long as the launcher is connected.
        """
        self._ending = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select():
                if key.fd == self._wake.fileno():
                    self._wake.clear()
                elif key.fd in self._open:
                    self._read(key.fd)
            self._take_again()
        self._take_again()
        for fd in list(self._open):
            left = _LEFT_BYTES
            while left > 0 and fd in self._open and (got := self._read(fd)):
                left -= got
            if fd in self._open:
                self._close(fd)
        self._selector.close()
        self._wake.close()

    def _take_again(self) -> None:
        while self._again:
            self.add(*self._again.popleft())

    def _read(self, fd: int) -> int:
        """Read the data that ``fd`` has now, send it, and return the number of its bytes.

        0 means that the stream has ended or that there is no data now.
        """
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        if not data or not self._credit.send(*self._open[fd], data):
            self._close(fd)
        return len(data)

    def _close(self, fd: int) -> None:
        self._credit.send(*self._open.pop(fd), b"")
        self._selector.unregister(fd)
        os.close(fd)


class Input:
    """The standard input of one rank: a pipe into which a thread writes data as fast as the rank reads it."""

    def __init__(self, used: Callable[[int], None]) -> None:
        """Start the thread, which calls ``used(nbytes)`` each time after it has written or discarded ``nbytes`` bytes.

        These bytes do not use memory any more then.
        """
        self.reader, self._writer = os.pipe()
        self._used = used
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddl-input", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Add ``data`` to the input of the rank, without waiting. If ``data`` is empty, the input ends."""
        self._pieces.put(data)

    def _run(self) -> None:
        gone = False
        while data := self._pieces.get():
            view = memoryview(data)
            while view and not gone:
                try:
                    view = view[os.write(self._writer, view) :]
                except OSError:  # the rank has closed its standard input
                    gone = True
            self._used(len(data))
        with contextlib.suppress(OSError):
            os.close(self._writer)
