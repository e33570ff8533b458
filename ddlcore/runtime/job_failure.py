"""Keeps the reason why a job has ended. Each operation that ends with the job gets an error with this reason."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddlcore.reentry import Lock


class JobFailure:
    """The reason why the job has ended. If several reasons are given, only the first reason is used."""

    def __init__(self) -> None:
        self.shown = False  # whether a user thread has got the reason as an exception
        self.met = False  # whether an operation has failed with it
        self._given = threading.Event()
        self._make: Callable[[str], BaseException] | None = None
        self._lock = Lock()

    def give(self, make: Callable[[str], BaseException]) -> bool:
        """Set the reason, and return True if no reason was set before. Otherwise change nothing and return False.

        ``make(during)`` must return the error for the operation that the text ``during`` names.
        """
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
