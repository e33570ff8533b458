"""Wake a thread that waits on file descriptors. This uses an eventfd or, if the system has no eventfd, a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

_ONE = (1).to_bytes(8, sys.byteorder)  # the format of an eventfd; a pipe carries it as well


class Wake:
    """An event with a file descriptor, ``fileno()``, which is readable after ``set`` until ``clear`` is called.

    Any thread may call ``set``, also a signal handler or a finalizer in the middle of another call of it. Only one
    thread, the owner, may call the other methods.
    """

    # This class has no lock. If ``set`` held one, a signal handler could interrupt it and wait for another lock of ddl.
    # If the thread that holds the other lock then called ``set``, both threads would wait for each other.

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ends: _Ends | None = _Ends()

    def fileno(self) -> int:
        """Return the descriptor, or -1 after ``close``."""
        return -1 if (ends := self._ends) is None else ends.reader

    def set(self) -> None:
        """Make ``fileno()`` readable, so that the thread that waits on it wakes.

        Does nothing after ``close``, and in a forked child, because the child's copy of the descriptor would wake the
        parent process.
        """
        ends = self._ends  # keeps the descriptors open, so that no other file gets their numbers during the write
        if ends is not None and os.getpid() == self._pid:
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
                os.write(ends.writer, _ONE)

    def clear(self) -> None:
        if (ends := self._ends) is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(ends.reader, 1 << 16)  # as much as a pipe holds

    def close(self) -> None:
        """Close the descriptors, as soon as no thread is in ``set`` any more. May be called again."""
        self._ends = None


class _Ends:
    """Two descriptors, which are closed when nothing refers to this object any more."""

    def __init__(self) -> None:
        self.reader = self.writer = -1  # if the system refuses a descriptor, there is nothing to close
        if hasattr(os, "eventfd"):
            self.reader = self.writer = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.reader, False)
            os.set_blocking(self.writer, False)

    def __del__(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # the module may be gone at the interpreter's end
        for fd in {self.reader, self.writer} - {-1}:
            close(fd)
