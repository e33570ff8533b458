"""What a framework runs beside a job: for calls that it carries out in the background, and nobody waits for in ddl."""

from __future__ import annotations

from typing import Any, TypeVar

from ddlcore.runtime.reentry import Lock

__all__ = ["Companion", "Companions"]


class Companion:
    """One for each job and class. ``job`` is the core's Job."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def settle(self) -> None:
        """The user's program ends well: returns when all that it has asked for is over, for better or worse."""

    def close(self) -> None:
        """The job is over: ends the companion's threads. May be called again."""


C = TypeVar("C", bound=Companion)


class Companions:
    """Those of one job. Any thread."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._lock = Lock()
        self._made: dict[type[Companion], Companion] = {}

    def get(self, kind: type[C]) -> C:
        """The job's companion of that class, made when it is asked for first."""
        made = self._made.get(kind)
        if made is None:
            self._lock.refuse("an operation")
            with self._lock:
                made = self._made.get(kind)
                if made is None:  # of two threads that ask at once, one makes it
                    made = self._made[kind] = kind(self._job)
        assert isinstance(made, kind)
        return made

    def settle(self) -> None:
        """Settles all."""
        for one in list(self._made.values()):
            one.settle()

    def close(self) -> None:
        """Closes all."""
        for one in list(self._made.values()):
            one.close()
