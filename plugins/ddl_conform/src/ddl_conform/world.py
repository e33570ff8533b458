"""Runs a function on all ranks of a world for a test. The ranks are threads of this process, each with its own job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from ddl_conform.ranks import Ranks
from ddl_conform.thread_jobs import thread_jobs
from ddlcore import api
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.plug.registry import Registry
from ddlcore.process.job import Job

__all__ = ["World", "run_world"]

T = TypeVar("T")

# The ranks of a test start at the same time, so after this time it makes no sense to wait any longer for a rank.
PATIENCE: Mapping[str, object] = {"start_timeout_s": 60.0, "open_timeout_s": 60.0, "leave_timeout_s": 5.0}
ENDING_S = 40.0  # for all ranks to leave, if some were stuck


class World:
    """A context manager that runs a world of ``size`` ranks, each of which is a thread with its own job.

    Only one thread may use this object. ``backend`` is the transport: "threads", "shm" or another transport whose ranks
    may share a process. ``hosts`` contains, for each rank, the index of the host on which it pretends to be; None means
    that all ranks are on one host. ``registry`` contains the available plugins; None means the installed plugins. If
    the function of a rank raises an error, the rank leaves the world.
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
        """Make the jobs of the ranks. The jobs are started at the beginning of the ``with`` block.

        ``settings`` are settings by name. ``driver`` is a search for better settings; None means no search. The
        docstring of the class explains the other arguments.
        """
        given = {**PATIENCE, **(settings or {})}
        self.jobs: list[Job] = thread_jobs(
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

        The verbs that ``function`` calls use the rank's job. If ``last`` is true, each rank leaves the world when its
        call of ``function`` has ended. If ranks raise errors, one of them is raised here, chosen as in ``Ranks.run``. A
        note is added that names the rank and lists the errors of the other ranks. If the calls have not ended after
        ``deadline_s`` seconds, ends the world, and raises DeadlinePassed with the stack of every thread.
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
        """Shut down the job of every rank, which also ends operations that hang. A second call has no effect."""
        self._end()
        self._ranks.close()

    def _end(self) -> None:
        if not self._leaving:
            self._leaving = [
                threading.Thread(target=job.shutdown, args=("its test ended",), daemon=True) for job in self.jobs
            ]
            for thread in self._leaving:
                thread.start()
        # In a later call, only join the threads of the first call. A second call of shutdown would not wait: shutdown
        # returns immediately while another thread still executes it.
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
    """Call ``function(rank, job)`` on every rank of a new world, whose ranks are ``size`` threads of this process.

    Return the results in the order of the ranks. ``World`` explains ``backend`` and ``settings``, and ``World.run``
    explains ``deadline_s`` and the errors that are raised.
    """
    with World(size, backend=backend, settings=settings) as world:
        return world.run(function, deadline_s=deadline_s, last=True)
