"""Divides a bucket among the blocks of a kernel: each tensor gets as many blocks as its size requires.

This module uses only lists and integers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_BYTES = 32 << 10  # of a chunk: several passes of a block; larger ones would leave multiprocessors idle at the end
LEAST_BYTES = 4 << 10  # one access of 16 bytes for each of 256 threads
WAVES = 4  # blocks for each multiprocessor that a bucket should have, unless chunks would be below LEAST_BYTES


def chunk_bytes(nbytes: int, multiprocessors: int) -> int:
    """Return the size of a chunk, in bytes, for a bucket of ``nbytes`` bytes.

    The size is a power of two between LEAST_BYTES and MOST_BYTES. One block of a kernel handles one chunk.
    """
    size = MOST_BYTES
    while size > LEAST_BYTES and nbytes < size * multiprocessors * WAVES:
        size >>= 1
    return size


def table(counts: Sequence[int], per_chunk: int) -> array[int]:
    """Return a table with a row of four words for each chunk of up to ``per_chunk`` elements.

    ``counts`` are the tensors' element counts; empty tensors have no row. A row contains: the index of the tensor, the
    position of the chunk's first element in the tensor, the chunk's number of elements, and the position of its first
    element in the bucket's contiguous memory.
    """
    rows = array("q")
    place = 0
    for tensor, count in enumerate(counts):
        for start in range(0, count, per_chunk):
            rows.extend((tensor, start, min(per_chunk, count - start), place + start))
        place += count
    return rows
