"""Keeps the memory into which buckets are packed, and memory for results that a caller does not give.

There is one buffer for each purpose. A buffer may be replaced by a larger one. Buffers are kept until the job ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from ddlcore.contracts.memory import LARGE_BYTES
from ddlcore.contracts.transport import Memory, Transport
from ddlcore.types import Buffer, DType

MOST_BLOCKS = 8  # large blocks for results that are remembered
MOST_BYTES = 256 << 20  # of all of them together
GRAIN = 8  # the size of a large block is rounded up by less than an eighth, so that it fits results of other sizes


class FusionBuffers:
    """The fusion buffers of one communicator: memory into which the tensors of a bucket are packed.

    Only the thread that runs buckets uses them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory: dict[str, Memory] = {}
        self._blocks: list[Memory] = []  # of large results, the oldest first; tensors may still use them

    def get(self, use: str, count: int, dtype: DType) -> Buffer:
        """Return a buffer of ``count`` elements of ``dtype``.

        ``use`` is any text that names the purpose. Calls with the same ``use`` return the same memory. If that memory
        is too small, a larger one replaces it. So a caller must not expect the values of an earlier call.
        """
        nbytes = count * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[use] = self._transport.allocate(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)

    def result(self, count: int, dtype: DType) -> Buffer:
        """Return memory for a result of ``count`` elements, which will belong to the user. Its owner is a Memory.

        The content is undefined. Nothing else uses the memory as long as the owner lives.
        """
        nbytes = count * dtype.itemsize
        memory = Memory(nbytes) if nbytes < LARGE_BYTES else _ResultMemory(self._block(nbytes), nbytes)
        return Buffer(memory.address, count, dtype, (count,), owner=memory)

    def _block(self, nbytes: int) -> Memory:
        """Return a block for a large result: one that no tensor uses any more, or else a new one."""
        # The system maps new memory page by page, and fills each page with zeros. For a large result, this takes about
        # as long as moving the data. A block is free if this list has the only reference to it: then nobody else can
        # obtain one. A destructor could return blocks as well, but an exception that a signal handler raises in a
        # destructor is lost.
        wanted, blocks = _rounded(nbytes), self._blocks
        for at in reversed(range(len(blocks))):
            if blocks[at].nbytes == wanted and _references(blocks, at) == _FREE:
                return blocks[at]
        block = Memory(wanted)
        blocks.append(block)
        while len(blocks) > MOST_BLOCKS or sum([one.nbytes for one in blocks]) > MOST_BYTES:
            del blocks[0]
        return block


class _ResultMemory(Memory):
    """The first ``nbytes`` bytes of a block."""

    def __init__(self, block: Memory, nbytes: int) -> None:
        self._block = block
        self.address = block.address
        self.nbytes = nbytes


def _rounded(nbytes: int) -> int:
    grain = max(1 << max(nbytes.bit_length() - 1, 0), GRAIN) // GRAIN
    return (nbytes + grain - 1) // grain * grain


def _references(blocks: Sequence[Memory], at: int) -> int:
    return sys.getrefcount(blocks[at])


def _references_of_a_free_block() -> int:
    """Return what ``_references`` returns for a block that only the list refers to; -1 if the count cannot be trusted."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # other threads may count references apart
        return -1
    return _references([Memory(1)], 0)


_FREE: Final = _references_of_a_free_block()
