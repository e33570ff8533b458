"""Memory for results that a caller does not give, such as those of an allgather. Large blocks are used again.

The system maps new memory page by page, and fills each page with zeros. For a large result, this takes about as long as
moving the data. So when the last tensor that uses a large block is gone, the block is kept for a later result.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ddlcore.contracts.memory import LARGE_BYTES, Memory

MOST_BLOCKS = 8
MOST_BYTES = 256 << 20  # of all blocks that are kept
GRAIN = 8  # the size of a large block is rounded up by less than an eighth, so that it fits results of other sizes


class FreeBlocks:
    """The blocks that no tensor uses. Any thread may call the methods, also a finalizer.

    A finalizer may run in the middle of any method, on the same thread. So the methods use no lock, and change
    ``_blocks`` only by single operations of a deque, which nothing can interrupt.
    """

    def __init__(self) -> None:
        self._blocks: deque[Memory] = deque()  # the one that was returned last is at the end

    def take(self, nbytes: int) -> Memory:
        """Return a block of at least ``nbytes`` bytes, whose content is undefined."""
        wanted = _rounded(nbytes)
        for block in reversed(list(self._blocks)):
            if block.nbytes == wanted:
                try:
                    self._blocks.remove(block)
                except ValueError:  # another thread has just taken it
                    continue
                return block
        return Memory(wanted)

    def give(self, block: Memory) -> None:
        """Keep ``block`` for a later call of ``take``. If too much is kept, drop the blocks that were returned first."""
        if block.nbytes > MOST_BYTES:
            return
        self._blocks.append(block)
        while len(self._blocks) > MOST_BLOCKS or sum([one.nbytes for one in list(self._blocks)]) > MOST_BYTES:
            try:
                self._blocks.popleft()
            except IndexError:  # other threads have taken them all
                return


def _rounded(nbytes: int) -> int:
    grain = max(1 << max(nbytes.bit_length() - 1, 0), GRAIN) // GRAIN
    return (nbytes + grain - 1) // grain * grain


FREE: Final = FreeBlocks()  # of the process: its worlds come and go, and its arrays may outlive them


class ResultMemory(Memory):
    """Memory of a large result. When nothing uses it any more, its block is kept for another result."""

    def __init__(self, nbytes: int) -> None:
        self._free = FREE  # kept here, because this object may outlive the module when the interpreter ends
        self._block = block = FREE.take(nbytes)
        self.address = block.address
        self.nbytes = nbytes

    def __del__(self) -> None:
        block = getattr(self, "_block", None)  # None if ``__init__`` was interrupted
        if block is not None:
            self._free.give(block)


def result_memory(nbytes: int) -> Memory:
    """Return memory for a result of ``nbytes`` bytes. Its content is undefined."""
    return Memory(nbytes) if nbytes < LARGE_BYTES else ResultMemory(nbytes)
