"""Worlds of threads: runs a function on n ranks in this process, each with its own Job, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from ddlcore import api
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.job import Job
from ddlcore.jobs import local_jobs
from ddlcore.plug.registry import Registry
from ddlcore.testing.ranks import Ranks

__all__ = ["World", "run_world"]

T = TypeVar("T")

# The ranks of a test start together, so a rank that waits longer than this would wait in vain.
PATIENCE: Mapping[str, object] = {"start_timeout_s": 60.0, "open_timeout_s": 60.0, "leave_timeout_s": 5.0}
ENDING_S = 40.0  # for all ranks to leave, if some were stuck


class World:
    """A context manager for ``size`` ranks, each of which is a thread with its own job.

    Only one thread may use the object. ``backend``: "threads", "shm" or another transport whose ranks may share a
    process. ``hosts``: the host index of each rank; None puts all ranks on one host. ``registry``: the available
    plugins; None for those that are installed. A rank that does not handle an error leaves the world.
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
        """Make the jobs of the ranks. They are started at the beginning of the ``with`` block.

        For ``registry`` and the other arguments see the class. ``driver`` searches for better settings.
        """
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
        """Call ``function(rank, job)`` on every rank, and return the results in the order of the ranks.

        Verbs that the function calls use the rank's job. ``last``: each rank leaves the world when its function ends.
        Raises the first error that is not the mere consequence of another rank's error, with a note that names the rank
        and lists the errors of the others. If ``deadline_s`` passes, ends the world, and raises DeadlinePassed with
        every thread's stack.
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
        """Make every rank leave, and abort those that hang. Calling it again has no effect."""
        self._end()
        self._ranks.close()

    def _end(self) -> None:
        if not self._leaving:
            self._leaving = [
                threading.Thread(target=job.shutdown, args=("its test ended",), daemon=True) for job in self.jobs
            ]
            for thread in self._leaving:
                thread.start()
        # Also join the threads when this is called again. To call shutdown again instead would not do: it returns
        # immediately while another thread is still busy with it.
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
    """Call ``function(rank, job)`` on every rank of a new world of ``size`` threads.

    Return the results in the order of the ranks; see World.run for the errors.
    """
    with World(size, backend=backend, settings=settings) as world:
        return world.run(function, deadline_s=deadline_s, last=True)
