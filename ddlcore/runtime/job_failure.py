"""Why a job is over: given once, and worded anew for each operation that it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddlcore.runtime.reentry import Lock

__all__ = ["JobFailure"]


class JobFailure:
    """Why the job is over, once it is. The first reason stands."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._make: Callable[[str], BaseException] | None = None
        self._lock = Lock()

    def give(self, make: Callable[[str], BaseException]) -> bool:
        """``make(during)`` builds the error for one operation. True if this is the first reason."""
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
