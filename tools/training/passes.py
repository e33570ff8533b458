"""A floor for training on two ranks: what an allreduce has to move through memory, by numpy, with nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from tools.training.meeting import Meeting

__all__ = ["Passes"]

CHUNK_BYTES, CHUNKS = 256 << 10, 4  # together as much as ddl's ring: what a core's own cache holds


class Passes:
    """Each rank copies its arrays into slots that both see, and adds what is in the other's to them.

    Nobody looks whether the other has come so far: the sums are of no use. Less cannot be moved, since each rank needs
    all that the other has; what one of them has not written anew costs the other less than it would.
    """

    def __init__(self, meet: Meeting) -> None:
        self._own, self._other = (
            np.frombuffer(meet.slots(rank), np.float32)[: CHUNKS * CHUNK_BYTES // 4].reshape(CHUNKS, -1)
            for rank in (meet.rank, (meet.rank + 1) % meet.ranks)
        )

    def __call__(self, arrays: Sequence[Any]) -> None:
        """``arrays``: flat, of float32; changed in place."""
        count = CHUNK_BYTES // 4
        turns = cycle(zip(self._own, self._other))
        for array in arrays:
            for begin in range(0, array.size, count):
                chunk = array[begin : begin + count]
                own, other = next(turns)
                own[: chunk.size] = chunk
                np.add(chunk, other[: chunk.size], out=chunk)
