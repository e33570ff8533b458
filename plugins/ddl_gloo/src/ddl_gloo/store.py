"""ddl's store as Gloo asks for one: neither a port of its own nor a stranger at it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store as TorchStore

from ddlcore.contracts.store import Store

__all__ = ["Meeting"]


class Meeting(TorchStore):
    """What Gloo calls while ranks connect, until ``until_s`` (of time.monotonic) at the latest.

    What the store raises (DeadlineExceeded, PeerLost) goes through Gloo as it is, and comes out of its constructor.
    ``said`` and ``heard`` keep what this rank and all ranks have published: their listeners' addresses are in it.
    """

    def __init__(self, store: Store, until_s: float) -> None:
        super().__init__()
        self._store = store
        self._until_s = until_s
        self.said: list[bytes] = []
        self.heard: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publishes; any rank may wait for it."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.said.append(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """What stands under ``key``; waits for it."""
        value = self._store.get(key, self._left_s())
        self.heard.append(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there. Gloo's own ``timeout`` begins anew with each call, ours does not."""
        for key in keys:
            self._store.get(key, self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())
