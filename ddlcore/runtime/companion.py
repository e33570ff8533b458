"""Holds the companions of a job: objects of a framework that make calls in the background, while no thread waits."""

from __future__ import annotations

from typing import TypeVar

from ddlcore.contracts.framework import Companion, JobService
from ddlcore.runtime.reentry import Lock

C = TypeVar("C", bound=Companion)


class Companions:
    """The companions of one job. Any thread may use them."""

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
        """Settle all companions."""
        for one in list(self._made.values()):
            one.settle()

    def close(self) -> None:
        """Close all companions."""
        for one in list(self._made.values()):
            one.close()
