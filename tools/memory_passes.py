"""A lower bound for shared memory: what a sharded allreduce moves on each rank, with numpy and without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Context
from ddlcore.types import Kind

__all__ = ["MemoryPasses"]

CHUNK_BYTES, CHUNKS = 128 << 10, 4  # as in the transport if ranks share cores


class MemoryPasses(BenchPeer):
    """Copies what the other ranks need of the tensor, adds this rank's part of all tensors, and copies the rest back.

    The slots are the rank's own memory, although other ranks' memory would be farther away. The sums are meaningless.
    """

    floor = True

    def open(self, context: Context) -> None:
        self._size = context.size

    def operation(self, kind: Kind, source: Any, target: Any) -> Callable[[], object]:
        if kind is not Kind.ALLREDUCE:
            raise NotImplementedError(f"no {kind.name.lower()}")
        count = CHUNK_BYTES // target.itemsize
        slots, results = (np.ones((CHUNKS, count), target.dtype) for _ in range(2))
        chunks = [target[at : at + count] for at in range(0, target.size, count)]

        def passes() -> None:
            for i, chunk in enumerate(chunks):
                own = chunk.size // self._size
                slot, result = slots[i % CHUNKS, : chunk.size], results[i % CHUNKS, : chunk.size]
                slot[own:] = chunk[own:]
                total = np.add(chunk[:own], slot[:own], out=result[:own])
                for peer in range(2, self._size):
                    total += slot[peer * own : (peer + 1) * own]
                chunk[:own] = total
                chunk[own:] = result[own:]

        return passes

    def close(self) -> None:
        """Do nothing: this peer holds no resources."""
