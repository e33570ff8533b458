"""The store contract: a small key-value store that the ranks of one job share while they open transports."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from ddlcore.errors import DeadlineExceeded

__all__ = ["PrefixStore", "Store"]

_CHECKED_S = 0.5  # interval at which ``get_checked`` calls its check; each time costs a message to the launcher


class Store(ABC):
    """A small and slow key-value store that all ranks share. It is for addresses and unique ids, never for tensors.

    Any thread may call the methods.
    """

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``. If ``key`` exists, replace its value."""

    @abstractmethod
    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until ``key`` exists, and return the value of ``key``.

        Raises DeadlineExceeded if ``key`` does not exist after ``timeout_s`` seconds. Raises PeerLost if a rank of the
        job dies during the wait.
        """

    def get_checked(self, key: str, timeout_s: float, check: Callable[[], None]) -> bytes:
        """Do the same as ``get``, but call ``check`` twice a second during the wait.

        If ``check`` raises an error, the wait ends with this error. A transport uses this in ``Transport.open``: its
        ``check`` raises an error after ``Transport.abort`` was called.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                return self.get(key, max(0.0, min(left_s, _CHECKED_S)))
            except DeadlineExceeded:
                if left_s <= _CHECKED_S:
                    raise
            check()

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the integer under ``key``, and return the sum. The addition is atomic.

        If ``key`` does not exist, its value counts as 0.
        """

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Delete every key that begins with ``prefix``."""


class PrefixStore(Store):
    """A part of another store. Each key is stored in the store ``base``, with ``prefix`` in front of the key."""

    def __init__(self, prefix: str, base: Store) -> None:
        self._prefix = prefix
        self._base = base

    def set(self, key: str, value: bytes) -> None:
        self._base.set(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._base.get(self._prefix + key, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._base.add(self._prefix + key, amount)

    def delete(self, prefix: str) -> None:
        self._base.delete(self._prefix + prefix)
