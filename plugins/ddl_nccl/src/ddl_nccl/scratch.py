"""Scratch memory on the device for queued calls. A block is kept until the queue has finished the calls that use it."""

from __future__ import annotations

from collections import deque

from ddlcore.contracts.device import Event, Queue
from ddlcore.contracts.transport import Memory


class Scratch:
    """One block of memory that the calls on a queue reuse in order. The block grows when a call needs more."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._memory: Memory | None = None
        self._left: deque[tuple[Event, Memory]] = deque()  # outgrown blocks that may still be in use

    def address(self, nbytes: int) -> int:
        """Return the address of a block of at least ``nbytes`` bytes, with the device's alignment.

        The content of the block is undefined.
        """
        while self._left and self._left[0][0].done():
            self._left.popleft()
        if self._memory is None or self._memory.nbytes < nbytes:
            if self._memory is not None:
                self._left.append((self._queue.record(), self._memory))
            self._memory = self._queue.runtime.allocate(nbytes)
        return self._memory.address
