"""Wakes a thread that waits on file descriptors: by an eventfd where there is one, else by a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

__all__ = ["Wake"]

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes; a pipe carries it as well


class Wake:
    """``fileno()`` is readable from ``set`` until ``clear``. Any thread may call ``set``; the rest is its owner's."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # A write after close could hit a stranger's descriptor of the same number. Reentrant: a signal handler or a
        # finalizer may call ``set`` in the middle of another.
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
        """Does nothing in a forked child: its copy of the descriptor would wake the parent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._raised and self._writer >= 0:
                with contextlib.suppress(BlockingIOError):  # a pipe that is full is readable
                    os.write(self._writer, _ONE)
                self._raised = (
                    True  # behind it: a signal handler may raise in between, and one byte too many is no harm
                )

    def clear(self) -> None:
        with self._lock:
            if self._reader >= 0:
                self._raised = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._reader, 1 << 10)

    def close(self) -> None:
        """May be repeated."""
        with self._lock:
            for fd in {self._reader, self._writer} - {-1}:
                os.close(fd)
            self._reader = self._writer = -1
            self._raised = False
