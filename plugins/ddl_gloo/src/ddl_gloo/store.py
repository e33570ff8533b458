"""Make ddl's store usable for Gloo, so that Gloo need not open a port for its own store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store as TorchStore

from ddlcore.contracts.store import Store
from ddlcore.errors import DeadlineExceeded

_SLICE_S = 0.5


class GlooStore(TorchStore):
    """The store that Gloo uses while the ranks connect.

    Every wait ends at the time ``until_s`` (of time.monotonic) at the latest, and soon after ``stopped()`` has become
    true. If ddl's store raises an error (DeadlineExceeded, PeerLost), the constructor of Gloo's group raises the same
    error. ``said`` holds the values that this rank has published, and ``heard`` holds the values of all ranks that this
    rank has read. Both contain the addresses at which the ranks listen.
    """

    def __init__(self, store: Store, until_s: float, stopped: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._until_s = until_s
        self._stopped = stopped  # called twice a second
        self.said: list[bytes] = []
        self.heard: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publish ``value`` under ``key``. Any rank may wait for the value."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.said.append(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""
        value = self._awaited(key)
        self.heard.append(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Gloo's ``timeout`` would begin again with each call. Therefore it is ignored, and ``until_s`` limits the wait.
        """
        for key in keys:
            self._awaited(key)

    def _awaited(self, key: str) -> bytes:
        while True:
            left_s = max(0.0, self._until_s - time.monotonic())
            try:
                return self._store.get(key, min(left_s, _SLICE_S))
            except DeadlineExceeded:
                if left_s <= _SLICE_S or self._stopped():
                    raise
