"""Memory that buckets are packed into: one growing buffer for each use, never given back during a job."""

from __future__ import annotations

from ddlcore.contracts.transport import Memory, Transport
from ddlcore.types import Buffer, DType

__all__ = ["FusionBuffers"]


class FusionBuffers:
    """Belongs to one communicator and to the engine thread alone."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory: dict[str, Memory] = {}

    def get(self, use: str, count: int, dtype: DType) -> Buffer:
        """Memory for ``count`` elements. What it held for the same ``use`` before is gone."""
        nbytes = count * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[use] = self._transport.allocate(max(nbytes, 4096))
        return Buffer(memory.address, count, dtype, (count,), owner=memory)
