"""Notices that a process has ended, and puts its end into words; what follows from it is decided elsewhere."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import threading
from collections import deque

from ddlcore.control.wake import Wake

__all__ = ["Watcher", "describe_exit", "open_pidfd"]


def describe_exit(returncode: int) -> str:
    """A return code of ``subprocess`` in words: "killed by signal 9 (SIGKILL)", "exited with code 3"."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-returncode}"


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable from the end of process ``pid`` on; -1 where the system has none.

    Raises ProcessLookupError when there is no such process.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # an old kernel, or a sandbox that forbids the call
        return -1


class Watcher:
    """Waits for the end of any of several child processes: by pidfd, else with one thread a process.

    Never by a socket: a grandchild that holds one hides the end of its parent for seconds. One
    thread adds and waits; ``wake`` may come from any.
    """

    def __init__(self) -> None:
        self._wake = Wake()
        self._poll = select.poll()
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._children: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pidfd: (rank, process)
        self._ended: deque[tuple[int, int]] = deque()  # what the threads found

    def add(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """``process`` is a child that nobody else waits for."""
        fd = open_pidfd(process.pid)
        if fd >= 0:
            self._children[fd] = (rank, process)
            self._poll.register(fd, select.POLLIN)
        else:
            threading.Thread(target=self._wait_for, args=(rank, process), name=f"ddl-watch-{rank}", daemon=True).start()

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """(rank, return code) of those that ended, within ``timeout_s``; [] at the timeout or after ``wake``."""
        ended = []
        for fd, _ in self._poll.poll(math.ceil(timeout_s * 1000)):
            if fd == self._wake.fileno():
                self._wake.clear()
                continue
            rank, process = self._children.pop(fd)
            self._poll.unregister(fd)
            os.close(fd)
            ended.append((rank, process.wait()))  # has ended: reaps, does not wait
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def wake(self) -> None:
        """Makes ``wait`` return soon."""
        self._wake.set()

    def close(self) -> None:
        """Stops watching; the processes are left as they are. May be repeated."""
        for fd in self._children:
            os.close(fd)
        self._children.clear()
        self._wake.close()

    def _wait_for(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ended.append((rank, process.wait()))
        self._wake.set()
