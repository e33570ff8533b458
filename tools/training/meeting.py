"""Lets the processes of a job meet and exchange a number, through memory that no contender uses."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator

__all__ = ["Meeting", "room"]

LINE = 64  # bytes of a cache line, which holds a rank's turn counter and its number
SLOTS_BYTES = 1 << 20  # of each rank, after the lines: for data that ranks exchange
PATIENCE_S = 60.0


@contextlib.contextmanager
def room(ranks: int) -> Iterator[str]:
    """Make the memory, and yield a path by which the processes that this one starts find it.

    The memory has no name in the file system, so that nothing can be left behind.
    """
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(_slots_at(ranks) + ranks * SLOTS_BYTES)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


class Meeting:
    """A barrier: a call returns when every rank has called it. Each rank makes its own object with the same ``path``.

    A waiting rank yields its core each time it looks. Raises TimeoutError after 60 s.
    """

    def __init__(self, rank: int, ranks: int, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), _slots_at(ranks) + ranks * SLOTS_BYTES))
        self.rank, self.ranks = rank, ranks
        self._turns, self._values = self._memory.cast("Q"), self._memory.cast("d")
        self._places = [each * LINE // 8 for each in range(ranks)]
        self._others = [place for each, place in enumerate(self._places) if each != rank]
        self._turn = 0

    def __call__(self) -> None:
        self._turn += 1
        self._turns[self._places[self.rank]] = self._turn
        until_s = time.monotonic() + PATIENCE_S
        for other in self._others:
            while self._turns[other] < self._turn:
                os.sched_yield()
                if time.monotonic() > until_s:
                    raise TimeoutError("a rank does not come to the barrier")

    def of_ranks(self, value: float) -> list[float]:
        """Return the ``value`` of each rank."""
        self._values[self._places[self.rank] + 1] = value
        self()
        values = [self._values[place + 1] for place in self._places]
        self()  # nobody may write the next number before all ranks have read this one
        return values

    def slots(self, rank: int) -> memoryview:
        """Return memory of that rank, which all ranks share; it begins on a page, filled with zeros."""
        begin = _slots_at(self.ranks) + rank * SLOTS_BYTES
        return self._memory[begin : begin + SLOTS_BYTES]


def _slots_at(ranks: int) -> int:
    return (ranks * LINE + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
