"""ddl's store as Gloo asks for one: neither a port of its own nor a stranger at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store as TorchStore

from ddlcore.contracts.store import Store
from ddlcore.errors import DeadlineExceeded

__all__ = ["Meeting"]

_SLICE_S = 0.5


class Meeting(TorchStore):
    """What Gloo calls while ranks connect, until ``until_s`` (of time.monotonic) at the latest.

    What the store raises (DeadlineExceeded, PeerLost) goes through Gloo as it is, and comes out of its constructor.
    ``said`` and ``heard`` keep what this rank and all ranks have published: their listeners' addresses are in it.
    """

    def __init__(self, store: Store, until_s: float, stopped: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._until_s = until_s
        self._stopped = stopped  # asked twice a second
        self.said: list[bytes] = []
        self.heard: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publishes; any rank may wait for it."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.said.append(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """What stands under ``key``; waits for it."""
        value = self._awaited(key)
        self.heard.append(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there. Gloo's own ``timeout`` begins anew with each call, ours does not."""
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
