"""Keeps the reason why a job has ended, and makes from it an error for each operation that ends with the job."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddlcore.runtime.reentry import Lock


class JobFailure:
    """The reason why the job has ended. If several reasons are given, the first one counts."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._make: Callable[[str], BaseException] | None = None
        self._lock = Lock()

    def give(self, make: Callable[[str], BaseException]) -> bool:
        """Set the reason, and return whether it is the first one. ``make(during)`` makes the error for an operation."""
        with self._lock:
            if self._make is not None:
                return False
            self._make = make
        self._given.set()
        return True

    def wait(self, timeout_s: float) -> bool:
        return self._given.wait(timeout_s)

    @property
    def given(self) -> bool:
        return self._make is not None

    def error(self, during: str = "") -> BaseException:
        assert self._make is not None
        return self._make(during)
