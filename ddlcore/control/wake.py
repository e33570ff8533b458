"""Wake a thread that waits on file descriptors. This uses an eventfd or, if the system has no eventfd, a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_ONE = (1).to_bytes(8, sys.byteorder)  # the format of an eventfd; a pipe carries it as well


class Wake:
    """An event with a file descriptor, ``fileno()``, which is readable after ``set`` until ``clear`` is called.

    Any thread may call ``set``. Only one thread, the owner, may call the other methods.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Without the lock, a write after ``close`` could go to another file that now has the same descriptor number.
        # The lock is reentrant, because a signal handler or a finalizer may call ``set`` in the middle of another call.
        self._lock = threading.RLock()
        self._raised = False
        if hasattr(os, "eventfd"):
            self._reader = self._writer = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        """Make ``fileno()`` readable, so that the thread that waits on it wakes.

        Does nothing in a forked child, because the child's copy of the descriptor would wake the parent process.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._raised and self._writer >= 0:
                with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
                    os.write(self._writer, _ONE)
                # Set only after writing: if a signal handler raises in between, a second write does no harm, but a
                # flag without a write would make all later calls skip the write, and the waiting thread would hang.
                self._raised = True

    def clear(self) -> None:
        with self._lock:
            if self._reader >= 0:
                self._raised = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reader, 1 << 10)

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        with self._lock:
            for fd in {self._reader, self._writer} - {-1}:
                os.close(fd)
            self._reader = self._writer = -1
            self._raised = False
