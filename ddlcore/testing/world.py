"""Worlds of threads: runs a function on n ranks in this process, each with its own Job, under a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from ddlcore import api
from ddlcore.job import Job, local_jobs
from ddlcore.plug.registry import Registry
from ddlcore.runtime.tuning import SearchDriver
from ddlcore.testing.ranks import Ranks

__all__ = ["World", "run_world"]

T = TypeVar("T")

# A test's ranks start together: who waits longer than this waits in vain.
PATIENCE: Mapping[str, object] = {"start_timeout_s": 60.0, "open_timeout_s": 60.0, "leave_timeout_s": 5.0}
ENDING_S = 40.0  # for all ranks to have left, where some were stuck


class World:
    """``size`` ranks, each a thread with its own job, from ``with`` to its end. One thread uses the object.

    ``backend``: "threads", "shm" or another whose ranks may share a process. ``hosts``: the host index
    of each rank; all on one where it is None. ``registry``: what is installed.
    A rank in which an error goes unhandled leaves the world.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str = "threads",
        settings: Mapping[str, object] | None = None,
        hosts: Sequence[int] | None = None,
        registry: Registry | None = None,
        driver: SearchDriver | None = None,
    ) -> None:
        """``registry``: what is on offer, where that is not what is installed. ``driver`` looks for better settings."""
        given = {**PATIENCE, **(settings or {})}
        self.jobs: list[Job] = local_jobs(
            size, backend=backend, settings=given, hosts=hosts, registry=registry, driver=driver
        )
        self._ranks = Ranks(size)
        self._leaving: list[threading.Thread] = []

    def __enter__(self) -> World:
        try:
            self.run(lambda rank, job: job.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[[int, Job], T], *, deadline_s: float = 90.0, last: bool = False) -> list[T]:
        """``function(rank, job)`` on every rank, whose verbs use its job there; the results, by rank.

        ``last``: each rank leaves the world when its function ends. Raises the first error that is no
        mere consequence of another, with a note that names its rank and tells the others' errors;
        DeadlinePassed with every thread's stack when ``deadline_s`` passes, after which the world is over.
        """

        def play(rank: int) -> T:
            job = self.jobs[rank]
            try:
                with api.use_job(job):
                    result = function(rank, job)
            except BaseException as error:
                job.shutdown(f"raised {type(error).__name__}: {error}")
                raise
            if last:
                job.shutdown()
            return result

        return self._ranks.run(play, deadline_s, self._end)

    def close(self) -> None:
        """Every rank leaves; what hangs is aborted. Idempotent."""
        self._end()
        self._ranks.close()

    def _end(self) -> None:
        if not self._leaving:
            self._leaving = [
                threading.Thread(target=job.shutdown, args=("its test ended",), daemon=True) for job in self.jobs
            ]
            for thread in self._leaving:
                thread.start()
        # The second time, too: a shutdown that has begun elsewhere returns at once, and would be taken for complete.
        until_s = time.monotonic() + ENDING_S
        for thread in self._leaving:
            thread.join(max(0.0, until_s - time.monotonic()))


def run_world(
    size: int,
    function: Callable[[int, Job], T],
    *,
    backend: str = "threads",
    deadline_s: float = 90.0,
    settings: Mapping[str, object] | None = None,
) -> list[T]:
    """``function(rank, job)`` in a new world of ``size`` threads; the results, by rank. See World.run for errors."""
    with World(size, backend=backend, settings=settings) as world:
        return world.run(function, deadline_s=deadline_s, last=True)
