"""Holds the memory into which buckets are packed: one growing buffer for each use, never released during a job."""

from __future__ import annotations

from ddlcore.contracts.transport import Memory, Transport
from ddlcore.types import Buffer, DType


class FusionBuffers:
    """The buffers of one communicator; only the engine's thread uses them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory: dict[str, Memory] = {}

    def get(self, use: str, count: int, dtype: DType) -> Buffer:
        """Return memory for ``count`` elements. This overwrites what was stored for the same ``use`` before."""
        nbytes = count * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[use] = self._transport.allocate(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)
