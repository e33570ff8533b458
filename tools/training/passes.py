"""A lower bound for training on two ranks: an allreduce's memory traffic, with numpy and without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from tools.training.meeting import Meeting

__all__ = ["Passes"]

CHUNK_BYTES, CHUNKS = 256 << 10, 4  # together as large as ddl's ring, and as a core's own cache


class Passes:
    """Copies this rank's arrays into slots that both ranks see, and adds the other rank's slots to the arrays.

    No rank checks whether the other has come so far, so the sums are meaningless. Less cannot be moved, because each
    rank needs all data of the other; but a slot that its owner has not written again is cheaper to read than in a real
    allreduce.
    """

    def __init__(self, meet: Meeting) -> None:
        self._own, self._other = (
            np.frombuffer(meet.slots(rank), np.float32)[: CHUNKS * CHUNK_BYTES // 4].reshape(CHUNKS, -1)
            for rank in (meet.rank, (meet.rank + 1) % meet.ranks)
        )

    def __call__(self, arrays: Sequence[Any]) -> None:
        """Pass over ``arrays``, which are flat and of float32, and are changed in place."""
        count = CHUNK_BYTES // 4
        turns = cycle(zip(self._own, self._other))
        for array in arrays:
            for begin in range(0, array.size, count):
                chunk = array[begin : begin + count]
                own, other = next(turns)
                own[: chunk.size] = chunk
                np.add(chunk, other[: chunk.size], out=chunk)
