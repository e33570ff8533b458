"""Memory of the device that queued calls use: kept until the queue is past them."""

from __future__ import annotations

from collections import deque

from ddlcore.contracts.device import Event, Queue
from ddlcore.contracts.transport import Memory

__all__ = ["Scratch"]


class Scratch:
    """One piece, used again by each call on the queue, which runs them in order; grown where one needs more."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._memory: Memory | None = None
        self._left: deque[tuple[Event, Memory]] = deque()  # outgrown, and perhaps in use

    def address(self, nbytes: int) -> int:
        """Of so many bytes, aligned as the device likes it; their content is undefined."""
        while self._left and self._left[0][0].done():
            self._left.popleft()
        if self._memory is None or self._memory.nbytes < nbytes:
            if self._memory is not None:
                self._left.append((self._queue.record(), self._memory))
            self._memory = self._queue.runtime.allocate(nbytes)
        return self._memory.address
