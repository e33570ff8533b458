"""Holds the memory into which buckets are packed: one buffer for each use, which may grow, never released in a job."""

from __future__ import annotations

from ddlcore.contracts.transport import Memory, Transport
from ddlcore.types import Buffer, DType


class FusionBuffers:
    """The fusion buffers of one communicator. Only the thread that runs buckets uses them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory: dict[str, Memory] = {}

    def get(self, use: str, count: int, dtype: DType) -> Buffer:
        """Return memory for ``count`` elements, which is the same memory as in an earlier call with the same ``use``.

        If that memory is too small, it is replaced. In both cases the former contents are lost to the caller.
        """
        nbytes = count * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[use] = self._transport.allocate(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)
