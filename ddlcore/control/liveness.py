"""Notice that a process has ended, and describe how it ended. Other modules decide what to do then."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
from collections import deque

from ddlcore.control.wake import Wake
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.threads import OwnThread


def describe_exit(returncode: int) -> str:
    """Describe ``returncode``, a return code of ``subprocess``, in words.

    For example, return "killed by signal 9 (SIGKILL)" for -9 and "exited with code 3" for 3.
    """
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-returncode}"


def open_pidfd(pid: int) -> int:
    """Return a file descriptor (a pidfd) that becomes readable when process ``pid`` ends.

    Returns -1 if the system does not support this. Raises ProcessLookupError if there is no such process.
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
    """An object that waits until at least one of several child processes ends.

    A Watcher uses a pidfd for each process or, if the system has no pidfds, a thread for each process. It does not
    watch the sockets of a child, because a grandchild may have the same socket open: the socket would then stay open
    for seconds after the child has ended. Any thread may call ``wake``. Only one thread may call the other methods.
    """

    def __init__(self) -> None:
        self._wake = Wake()
        self._poll = select.poll()
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._children: dict[int, tuple[LaunchedRank, subprocess.Popen[bytes]]] = {}  # by pidfd: (rank, process)
        # Ends that the threads have found.
        self._ended: deque[tuple[LaunchedRank, subprocess.Popen[bytes], int]] = deque()
        self._forgotten: list[subprocess.Popen[bytes]] = []

    def add(self, rank: LaunchedRank, process: subprocess.Popen[bytes]) -> None:
        """Watch the child process ``process``, which runs ``rank``. No other code may wait for this child."""
        fd = open_pidfd(process.pid)
        if fd >= 0:
            self._children[fd] = (rank, process)
            self._poll.register(fd, select.POLLIN)
        else:
            OwnThread(target=self._wait_for, args=(rank, process), name=f"ddl-watch-{rank}").start()

    def wait(self, timeout_s: float) -> list[tuple[LaunchedRank, int]]:
        """Wait at most ``timeout_s`` until a process ends, and return (rank, return code) for each ended process.

        Each process is returned only once. Returns [] after the timeout, or if another thread called ``wake``.
        """
        ended = []
        for fd, _ in self._poll.poll(math.ceil(timeout_s * 1000)):
            if fd == self._wake.fileno():
                self._wake.clear()
                continue
            rank, process = self._children.pop(fd)
            self._poll.unregister(fd)
            os.close(fd)
            ended.append((rank, process.wait()))  # does not block: the process has ended, and this reaps it
        while self._ended:
            rank, process, returncode = self._ended.popleft()
            if not any(process is one for one in self._forgotten):
                ended.append((rank, returncode))
        return ended

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Stop watching ``process``, whose end then counts no more."""
        for fd, (_, one) in list(self._children.items()):
            if one is process:
                del self._children[fd]
                self._poll.unregister(fd)
                os.close(fd)
        self._forgotten.append(process)

    def wake(self) -> None:
        """Make the current or the next call of ``wait`` return soon. Any thread may call this."""
        self._wake.set()

    def close(self) -> None:
        """Stop watching the processes, which continue to run. May be called again."""
        for fd in self._children:
            os.close(fd)
        self._children.clear()
        self._wake.close()

    def _wait_for(self, rank: LaunchedRank, process: subprocess.Popen[bytes]) -> None:
        self._ended.append((rank, process, process.wait()))
        self._wake.set()
