"""A store for ranks that are threads of one test: a dictionary and a condition variable."""

from __future__ import annotations

import threading
import time

from ddlcore.contracts.store import Store
from ddlcore.errors import DeadlineExceeded

__all__ = ["ThreadStore"]


class ThreadStore(Store):
    """A store for ranks that are threads of one process. All ranks use the same object."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._values:
                if not self._changed.wait(until_s - time.monotonic()) and time.monotonic() >= until_s:
                    raise DeadlineExceeded(f"no rank has put {key!r} into the store within {timeout_s:g} s")
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            self._changed.notify_all()
            return total

    def delete(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]
