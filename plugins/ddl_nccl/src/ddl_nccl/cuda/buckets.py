"""Turns the addresses of a bucket's tensors into kernel launches.

A kernel reads a table of the bucket's chunks and a table of the tensors' addresses. When a bucket runs again, as in
replay, its tables are kept, and only the addresses in them change. This module prepares the tables and the arguments of
kernels. A ``Ground`` allocates memory and launches kernels.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ddl_nccl.cuda.chunks import chunk_bytes, table
from ddl_nccl.cuda.names import COPY, FILL, Name, conversion, reduction
from ddlcore.contracts.kernels import Kernels
from ddlcore.types import DType, ReduceOp

ARRANGED = 64  # the number of buckets whose tables pack() and unpack() keep
BLOCK_BYTES = 32 << 10  # bytes that one block reduces or fills


class KernelLaunch(ABC):
    """A kernel with its number of blocks and its arguments. It can run several times."""

    @abstractmethod
    def set(self, index: int, value: float) -> None:
        """Set the kernel's argument at the position ``index`` for all later runs."""

    @abstractmethod
    def run(self) -> None:
        """Queue the kernel with its current arguments."""


class Addresses(ABC):
    """A table of memory addresses that kernels read. ``address`` is the address of the table itself."""

    address: int

    @abstractmethod
    def fill(self, addresses: Sequence[int]) -> None:
        """Set the content of the table for all work that is queued from now on.

        This method costs almost nothing if the addresses have not changed.
        """


class Ground(ABC):
    """A device's stream, or a simulation of a stream.

    It has the functions that buckets need: memory and kernel launches.
    """

    multiprocessors: int

    @abstractmethod
    def constant(self, words: array[int]) -> Any:
        """Return memory that contains ``words``. Kernels read the words at the ``address`` of the returned object.

        The memory is freed when the last reference to the returned object is deleted.
        """

    @abstractmethod
    def addresses(self, n: int) -> Addresses: ...

    @abstractmethod
    def prepare(self, name: Name, blocks: int, arguments: Sequence[int | float]) -> KernelLaunch:
        """Return a launch of the kernel ``name`` with ``blocks`` blocks and these arguments.

        Raises DeviceError if the kernel is not available.
        """

    @abstractmethod
    def can_run(self, name: Name) -> bool:
        """Return whether ``prepare`` would succeed for the kernel ``name``.

        If not, ``copier`` makes plain copies instead.
        """

    @abstractmethod
    def copier(self, sizes: Sequence[int]) -> Callable[[Sequence[int], Sequence[int]], None]:
        """Return a function that copies blocks of memory without a kernel.

        ``sizes`` are the sizes of the blocks in bytes. The function takes the addresses of the sources and the
        addresses of the targets.
        """


class BucketCopy:
    """The packing or the unpacking of tensors with fixed element counts. Its tables are made once."""

    def __init__(
        self, ground: Ground, counts: Sequence[int], dtype: DType, wire: DType, scale: float, unpack: bool
    ) -> None:
        source, target = (wire, dtype) if unpack else (dtype, wire)
        name = conversion(source, target, scale)
        self._nothing = not any(counts)
        if self._nothing:
            return
        if name == COPY and not ground.can_run(COPY):
            self.run = _Copies(ground, counts, dtype, unpack).run  # type: ignore[method-assign]  # plain copies only
            return
        item = max(source.itemsize, target.itemsize)
        per_chunk = chunk_bytes(sum(counts) * item, ground.multiprocessors) // item
        if name == COPY:  # the copy kernel's table is in bytes
            counts = [count * item for count in counts]
            per_chunk *= item
        rows = table(counts, per_chunk)
        self._chunks = ground.constant(rows)
        self._addresses = ground.addresses(len(counts))
        arguments = (self._chunks.address, self._addresses.address, 0, int(unpack), scale)
        self._launch = ground.prepare(name, len(rows) // 4, arguments)

    def run(self, tensors: Sequence[int], flat: int) -> None:
        """Queue the copy between the tensors at the addresses ``tensors`` and the contiguous elements at ``flat``."""
        if self._nothing:
            return
        self._addresses.fill(tensors)
        self._launch.set(2, flat)
        self._launch.run()


class _Copies:
    """The packing or the unpacking of tensors by copies that CUDA's driver makes, without a kernel."""

    def __init__(self, ground: Ground, counts: Sequence[int], dtype: DType, unpack: bool) -> None:
        self._tensors = [i for i, count in enumerate(counts) if count]
        sizes = [counts[i] * dtype.itemsize for i in self._tensors]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._copy = ground.copier(sizes)
        self._unpack = unpack

    def run(self, tensors: Sequence[int], flat: int) -> None:
        near = [tensors[i] for i in self._tensors]
        far = [flat + offset for offset in self._offsets]
        self._copy(*((far, near) if self._unpack else (near, far)))


class CudaKernels(Kernels):
    """The kernels of the device contract, over a ``Ground`` (a stream).

    Every call is queued and returns immediately.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        # A bucket that runs again reuses its tables: the most recently used tables are kept.
        self._bucket = functools.lru_cache(ARRANGED)(functools.partial(BucketCopy, ground))
        self._sources = functools.lru_cache(ARRANGED)(ground.addresses)

    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        self._bucket(tuple(counts), dtype, wire, scale, False).run(sources, target)

    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        self._bucket(tuple(counts), dtype, wire, scale, True).run(targets, source)

    def reduce(
        self,
        sources: Sequence[int],
        target: int,
        count: int,
        dtype: DType,
        op: ReduceOp,
        scale: float = 1.0,
        prescale: float = 1.0,
    ) -> None:
        if count == 0:
            return
        addresses = self._sources(len(sources))
        addresses.fill(sources)
        share = chunk_bytes(count * dtype.itemsize, self._ground.multiprocessors) // dtype.itemsize
        arguments = (addresses.address, len(sources), target, count, share, prescale, scale)
        self._ground.prepare(reduction(dtype, op), -(-count // share), arguments).run()

    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return
        arguments = (target, nbytes, BLOCK_BYTES, _pattern(dtype, op))
        self._ground.prepare(FILL, -(-nbytes // BLOCK_BYTES), arguments).run()


def _pattern(dtype: DType, op: ReduceOp) -> int:
    """Return the identity element of ``op``, repeated until it fills a word of 64 bits, as a signed number."""
    bits = 8 * dtype.itemsize
    word = 0
    for _ in range(64 // bits):
        word = (word << bits) | _identity(dtype, op)
    return word - (1 << 64) if word >> 63 else word


def _identity(dtype: DType, op: ReduceOp) -> int:
    """Return the bits of the identity element of ``op`` for the type ``dtype``, such as those of 1 for a product."""
    bits = 8 * dtype.itemsize
    if dtype is DType.BOOL:
        return int(op in (ReduceOp.Min, ReduceOp.Product))
    if op is ReduceOp.Sum:
        return 0
    if dtype.is_float:
        one, infinity = _FLOATS[dtype]
        return one if op is ReduceOp.Product else infinity | (1 << (bits - 1) if op is ReduceOp.Max else 0)
    if op is ReduceOp.Product:
        return 1
    if dtype in (DType.U8, DType.U16):
        return (1 << bits) - 1 if op is ReduceOp.Min else 0
    return (1 << (bits - 1)) - (1 if op is ReduceOp.Min else 0)


_FLOATS = {  # the bits of 1 and of infinity
    DType.F16: (0x3C00, 0x7C00),
    DType.BF16: (0x3F80, 0x7F80),
    DType.F32: (0x3F800000, 0x7F800000),
    DType.F64: (0x3FF0000000000000, 0x7FF0000000000000),
}
