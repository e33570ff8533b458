"""The memory that transports and devices allocate for their callers."""

from __future__ import annotations

import ctypes

__all__ = ["Memory", "view"]

LARGE_BYTES = 1 << 20


class Memory:
    """A block of memory from which a transport can send efficiently. The memory lives as long as this object.

    ``address`` is the address of the first byte, and ``nbytes`` is the size. This class uses plain process memory with
    undefined content. Transports and devices may return objects of subclasses that use other memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes: object
        if nbytes < LARGE_BYTES:
            self._bytes = small = (ctypes.c_char * (nbytes + 64))()
            start = ctypes.addressof(small)
        else:  # numpy requests huge pages and does not touch them: five times as fast for 64 MiB
            import numpy as np

            self._bytes = large = np.empty(nbytes + 64, np.uint8)
            start = large.ctypes.data
        self.address = (start + 63) & ~63  # cache-line aligned
        self.nbytes = nbytes


def view(address: int, nbytes: int) -> memoryview:
    """Return the ``nbytes`` writable bytes at ``address``, without a copy. The caller must keep the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(bytearray())
