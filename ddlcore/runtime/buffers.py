"""Keeps the memory into which buckets are packed.

There is one buffer for each purpose. A buffer may be replaced by a larger one. Buffers are kept until the job ends.
"""

from __future__ import annotations

from ddlcore.contracts.transport import Memory, Transport
from ddlcore.types import Buffer, DType


class FusionBuffers:
    """The fusion buffers of one communicator: memory into which the tensors of a bucket are packed.

    Only the thread that runs buckets uses them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory: dict[str, Memory] = {}

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
