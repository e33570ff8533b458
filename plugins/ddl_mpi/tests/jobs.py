"""Jobs whose ranks mpiexec starts, with the test as the launcher: a guard runs between mpiexec and each rank.

mpiexec kills all processes when one of them fails. It does not notice that behind guards, as with `ddl run`, so a test
can observe what happens to the other ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddl_mpi.library import find_library

from ddlcore.control.server import Server
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_sessions
from ddlcore.process.environment import Environment
from ddlcore.types import Placement

__all__ = ["OPENMPI", "PROGRAMS", "Job", "run"]

PROGRAMS = Path(__file__).parent / "programs"
GUARD = Path(__file__).parent / "guard.py"
# Open MPI refuses to run as root, or with more ranks than cores, unless it is told that this is intended.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Job:
    """A job of ``size`` ranks, which have MPI's ranks in reverse order; they run ``program`` with ``args``."""

    def __init__(
        self, folder: Path, size: int, program: Path, *args: str, environ: Mapping[str, str] | None = None
    ) -> None:
        given = {**os.environ, **OPENMPI, "DDL_BACKEND": "mpi", **(environ or {})}
        given["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        settings, registry = settings_of(given)
        mpiexec = find_library().mpiexec  # before anything is started, because it raises if there is no library
        self._server = Server(size, build_sessions(size, settings, registry))
        self._server.start()
        self._folder = folder
        self._size = size
        ranks = [Environment(Placement(r, (0,) * size), self._server.job_file).variables() for r in range(size)]
        (folder / "ranks.json").write_text(json.dumps(ranks[::-1]))
        command = [sys.executable, str(GUARD), str(folder), sys.executable, str(program), *args]
        self._output = open(folder / "mpiexec", "w+")  # noqa: SIM115  # closed in close
        self._process = subprocess.Popen(
            [mpiexec, "-n", str(size), *command],
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._ended = [threading.Event() for _ in range(size)]
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed and not all(event.is_set() for event in self._ended):
            for rank, event in enumerate(self._ended):
                if not event.is_set() and (self._folder / f"{rank}.code").exists():
                    self._server.rank_ended(LaunchedRank(rank), f"it ended with {self.code(rank)}")
                    event.set()
            time.sleep(0.01)

    def code(self, rank: int) -> int:
        """Return the rank's exit code, or the negative number of the signal that ended it."""
        return int((self._folder / f"{rank}.code").read_text())

    def output(self, rank: int) -> str:
        """Return what the rank has printed so far, errors included."""
        return (self._folder / f"{rank}.out").read_text()

    def kill(self, rank: int) -> None:
        """Kill the rank with signal 9."""
        os.kill(int((self._folder / f"{rank}.pid").read_text()), signal.SIGKILL)

    def await_word(self, rank: int, word: str, timeout_s: float = 120.0) -> None:
        """Wait until ``rank`` has printed ``word``. Fail at once if it has ended without."""
        until_s = time.monotonic() + timeout_s
        output = self._folder / f"{rank}.out"
        while True:
            over = self._ended[rank].is_set() or self._process.poll() is not None  # first: the word may be its last
            if output.exists() and word in self.output(rank):
                return
            assert not over, f"rank {rank} ended without {word!r}\n{self.told()}"
            assert time.monotonic() < until_s, f"rank {rank} did not say {word!r}\n{self.told()}"
            time.sleep(0.01)

    def await_end(self, rank: int, timeout_s: float = 160.0) -> int:
        """Wait until the rank has ended, and return its exit code."""
        assert self._ended[rank].wait(timeout_s), f"rank {rank} did not end within {timeout_s:g} s\n{self.told()}"
        return self.code(rank)

    def told(self) -> str:
        """Return everything that was printed."""
        self._output.flush()
        texts = [(self._folder / "mpiexec").read_text()]
        texts += [f"[{r}] {self.output(r)}" for r in range(self._size) if (self._folder / f"{r}.out").exists()]
        return "\n".join(texts)

    def close(self) -> None:
        """End all remaining processes."""
        self._closed = True
        (self._folder / "over").touch()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
        for rank in range(self._size):
            with suppress(OSError, ValueError):
                os.kill(int((self._folder / f"{rank}.pid").read_text()), signal.SIGKILL)
        self._thread.join(20)
        self._server.close()
        self._output.close()


def run(folder: Path, size: int, program: Path, *args: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Run a job that must succeed, and return what each rank has printed.

    Raises AssertionError with all output if a rank fails.
    """
    job = Job(folder, size, program, *args, environ=environ)
    try:
        for rank in range(size):
            assert job.await_end(rank) == 0, job.told()
        return [job.output(rank) for rank in range(size)]
    finally:
        job.close()
