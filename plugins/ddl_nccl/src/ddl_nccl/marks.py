"""Events of a queue with a deadline for each event, to limit how long a bucket may take on the device."""

from __future__ import annotations

import time
from collections import deque

from ddlcore.contracts.device import Event


class Marks:
    """A list of events and their deadlines. One thread adds events, and another thread checks them."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s  # 0: no limit
        self._left: deque[tuple[float, Event]] = deque()

    def set(self, event: Event) -> None:
        """Add ``event``, which must be done within ``patience_s`` seconds from now."""
        self._left.append((time.monotonic() + self.patience_s, event))

    def late(self) -> bool:
        """Return whether an event has missed its deadline.

        Raises DeviceError if the device failed before an event was done.
        """
        while self._left:
            until_s, event = self._left[0]
            if not event.done():
                return time.monotonic() > until_s
            self._left.popleft()
        return False
