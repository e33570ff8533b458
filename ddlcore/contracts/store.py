"""The store contract: a few bytes under a name, shared by the ranks of one job while transports open."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["PrefixStore", "Store"]


class Store(ABC):
    """Shared, small, slow: for addresses and unique ids, never for tensors. Any thread may call."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Puts ``value`` under ``key``, in place of what was there."""

    @abstractmethod
    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until ``key`` exists and returns its value.

        Raises DeadlineExceeded after ``timeout_s``, PeerLost when a rank of the job dies meanwhile.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to the whole number under ``key`` (0 where there is none) and returns the sum, atomically."""

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Forgets every key that begins with ``prefix``."""


class PrefixStore(Store):
    """A part of another store, as if it were alone."""

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
