"""Wakes a thread that waits on file descriptors: by an eventfd where there is one, else by a pipe."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["Wake"]

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes; a pipe carries it as well


class Wake:
    """``fileno()`` is readable from ``set`` until ``clear``. Any thread may call ``set``; the rest is its owner's."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a write after close could hit a stranger's descriptor of the same number
        self._raised = False
        if hasattr(os, "eventfd"):
            self._reader = self._writer = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        """Does nothing in a forked child: its copy of the descriptor would wake the parent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._raised and self._writer >= 0:
                self._raised = True
                os.write(self._writer, _ONE)

    def clear(self) -> None:
        with self._lock:
            if self._raised:
                self._raised = False
                os.read(self._reader, len(_ONE))

    def close(self) -> None:
        """May be repeated."""
        with self._lock:
            for fd in {self._reader, self._writer} - {-1}:
                os.close(fd)
            self._reader = self._writer = -1
            self._raised = False
