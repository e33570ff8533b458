"""Real processes under a real control server, started from a warm server of forks so that hundreds of deaths fit a test."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ddlcore.control.liveness import describe_exit
from ddlcore.control.server import Server
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_sessions
from ddlcore.process.environment import Environment
from ddlcore.types import Placement

__all__ = ["LEAK_MARK", "Launch", "Report", "leftovers"]

LEAK_MARK = "PYTEST_LEAK_MARK"  # in the environment of every process of a session of tests, with its own value
HANGS_S = 50.0  # shortly before a test gives up
STAYS_S = 10.0  # what is still there after so long is left behind

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.warm"])


@dataclass
class Report:
    """What one rank said, each with its moment (monotonic seconds)."""

    said: list[tuple[str, float, str]] = field(default_factory=list)

    def at(self, word: str) -> tuple[float, str] | None:
        for what, moment_s, detail in self.said:
            if what == word:
                return moment_s, detail
        return None


class Launch:
    """``size`` processes that run ``program(rank, say)``; the test plays the launcher.

    What each process writes to its standard output and error is part of the message if the test waits for a word in
    vain. All processes are ended then.
    """

    def __init__(self, size: int, program: Callable[[int, Callable[..., None]], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ddl-launch-"))
        settings, registry = settings_of(os.environ)
        self.server = Server(size, build_sessions(size, settings, registry))
        self.server.start()
        self.reports = [Report() for _ in range(size)]
        self._lock = threading.Condition()
        self._silent: set[int] = set()  # the ranks that have ended: everything they said has been heard
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            environment = Environment(Placement(rank, (0,) * size), self.server.job_file).variables()
            mine, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_play, args=(rank, environment, program, theirs, self._output(rank)))
            process.start()
            theirs.close()
            self._ranks.append((process, mine))
        self._threads = [threading.Thread(target=self._listen, args=(r,), daemon=True) for r in range(size)]
        self._threads += [threading.Thread(target=self._wait, args=(r,), daemon=True) for r in range(size)]
        for thread in self._threads:
            thread.start()

    def _listen(self, rank: int) -> None:
        connection = self._ranks[rank][1]
        try:
            while True:
                said = connection.recv()
                with self._lock:
                    self.reports[rank].said.append(said)
                    self._lock.notify_all()
        except (EOFError, OSError):
            with self._lock:
                self._silent.add(rank)
                self._lock.notify_all()

    def _wait(self, rank: int) -> None:
        process = self._ranks[rank][0]
        process.join()
        assert process.exitcode is not None
        self.server.rank_ended(LaunchedRank(rank), describe_exit(process.exitcode))

    def await_word(self, rank: int, word: str, timeout_s: float = 80.0) -> tuple[float, str]:
        """Return the moment at which ``rank`` said ``word``, and the detail that it said with the word.

        Raises AssertionError after ``timeout_s`` seconds, or as soon as the rank has ended without the word.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while (found := self.reports[rank].at(word)) is None:
                left_s = deadline_s - time.monotonic()
                if rank in self._silent or left_s <= 0:
                    break
                self._lock.wait(left_s)
        if found is None:
            ended = "ended without" if rank in self._silent else f"did not within {timeout_s:g} s say"
            told = self._told()
            self.close(5.0)
            raise AssertionError(f"rank {rank} {ended} {word!r}\n{told}")
        return found

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank.{rank}"

    def _told(self) -> str:
        """Return what each rank has said, and the end of what it has written."""
        lines = []
        for rank, report in enumerate(self.reports):
            output = self._output(rank)
            written = output.read_text(errors="replace")[-8000:] if output.exists() else ""
            lines.append(f"rank {rank} said {report.said} and wrote:\n{written}")
        return "\n".join(lines)

    def kill(self, rank: int) -> float:
        """kill -9, and when."""
        pid = self._ranks[rank][0].pid
        assert pid is not None
        moment_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return moment_s

    def stop(self, rank: int, pause_s: float) -> None:
        """Let the process of ``rank`` stand still for ``pause_s`` seconds, unless it has ended."""
        process = self._ranks[rank][0]
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(pause_s)
            os.kill(process.pid, signal.SIGCONT)

    def close(self, timeout_s: float = 40.0) -> list[int]:
        """Waits for the end of all; the ranks that had to be killed for it."""
        deadline_s = time.monotonic() + timeout_s
        hung = []
        for rank, (process, _) in enumerate(self._ranks):
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                hung.append(rank)
                process.kill()
                process.join()
        for thread in self._threads:
            thread.join(20.0)
        for process, connection in self._ranks:
            connection.close()
            process.close()
        self.server.close()
        if hung:  # pytest shows this with the test's failure
            print(f"ranks {hung} had to be killed\n{self._told()}")
        shutil.rmtree(self._folder)
        return hung


def _play(
    rank: int,
    environment: dict[str, str],
    program: Callable[[int, Callable[..., None]], None],
    out: Connection,
    output: Path,
) -> None:
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # Who hangs says where. Not earlier: it reads the stacks of running threads without a lock, which may end the process.
    faulthandler.dump_traceback_later(HANGS_S)
    os.environ.update(environment)

    def say(word: str, detail: Any = "") -> None:
        out.send((word, time.monotonic(), str(detail)))

    try:
        program(rank, say)
    except Exception as error:
        traceback.print_exc()
        say("raised", f"{type(error).__name__}: {error}")
        sys.exit(1)


def leftovers(before: Sequence[str] | None = None) -> list[str]:
    """Entries of /dev/shm and abstract sockets of ours that were not there ``before``, and stay.

    What a process of another session holds is that session's: other tests run at the same time.
    """
    left = [one for one in _entries() if one not in (before or ())]
    until_s = time.monotonic() + STAYS_S
    while before is not None and left:
        others = _held_by_others()
        there = _entries()  # after the others: what they have let go meanwhile was theirs, and is gone
        left = [one for one in left if one in there and one not in others]
        if time.monotonic() > until_s:
            break
        time.sleep(0.05 if left else 0.0)
    return left


def _entries() -> list[str]:
    # /proc does not tell who holds a semaphore of Python's multiprocessing, and Python's resource tracker removes it.
    names = [name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")]
    return [f"/dev/shm/{name}" for name in names] + list(_sockets().values())


def _sockets() -> dict[str, str]:
    """Names of Unix sockets of ours, abstract ones and those whose file is gone, by what a descriptor of one links to."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table if "@ddl" in line or "/ddl-" in line]
    return {f"socket:[{row[6]}]": row[7] for row in rows}


def _held_by_others() -> set[str]:
    """Entries that live processes have open or mapped which are neither this one nor started by its session."""
    sockets = _sockets()
    held: set[str] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if not entry.name.isdecimal() or int(entry.name) == os.getpid() or _is_ours(entry):
                continue
            for descriptor in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile; the others are held all the same
                    link = os.readlink(descriptor)
                    held.add(sockets.get(link, link))
            held.update(line.split(maxsplit=5)[5].strip() for line in _mapped(entry) if "/dev/shm/" in line)
    return held


def _is_ours(entry: Path) -> bool:
    mark = f"{LEAK_MARK}={os.environ[LEAK_MARK]}".encode()
    return mark in (entry / "environ").read_bytes().split(b"\0")


def _mapped(entry: Path) -> list[str]:
    return (entry / "maps").read_text(errors="replace").splitlines()
