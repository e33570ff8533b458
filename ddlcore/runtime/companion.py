"""Keeps the companions of a job.

A companion is an object of a framework's package that exists as long as the job. For example, it makes calls of ddl in
the background, while no thread of the user waits for them.
"""

from __future__ import annotations

from typing import TypeVar

from ddlcore.contracts.framework import Companion, JobService
from ddlcore.reentry import Lock

C = TypeVar("C", bound=Companion)


class Companions:
    """The companions of one job: objects of framework packages that live as long as the job.

    There is at most one companion of each class. Any thread may use this object. See contracts.framework.Companion.
    """

    def __init__(self, job: JobService) -> None:
        self._job = job
        self._lock = Lock()
        self._made: dict[type[Companion], Companion] = {}

    def get(self, kind: type[C]) -> C:
        """Return the job's companion of class ``kind``. The first call for a class creates it."""
        made = self._made.get(kind)
        if made is None:
            self._lock.refuse("an operation")
            with self._lock:
                made = self._made.get(kind)
                if made is None:  # if two threads ask at the same time, only one makes it
                    made = self._made[kind] = kind(self._job)
        assert isinstance(made, kind)
        return made

    def settle(self) -> None:
        """Call ``settle`` of each companion.

        Each call waits until all operations that the user's program asked the companion for have ended.
        """
        for one in list(self._made.values()):
            one.settle()

    def close(self) -> None:
        """Call ``close`` of each companion, because the job has ended. The companion then ends its threads."""
        for one in list(self._made.values()):
            one.close()
