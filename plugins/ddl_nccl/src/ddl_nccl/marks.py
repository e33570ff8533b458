"""Moments of a queue by which the device has to have come: where a bucket may take only so long."""

from __future__ import annotations

import time
from collections import deque

from ddlcore.contracts.device import Event

__all__ = ["Marks"]


class Marks:
    """One thread sets them, another looks."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s  # 0: for ever
        self._left: deque[tuple[float, Event]] = deque()

    def set(self, event: Event) -> None:
        """It is to come within ``patience_s`` from now."""
        self._left.append((time.monotonic() + self.patience_s, event))

    def late(self) -> bool:
        """Whether one has not come in its time. Raises DeviceError where the device failed before it."""
        while self._left:
            until_s, event = self._left[0]
            if not event.done():
                return time.monotonic() > until_s
            self._left.popleft()
        return False
