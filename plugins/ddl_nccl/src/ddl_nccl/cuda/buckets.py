"""Turns sequences of addresses into launches: tables are made once, and in replay only addresses change.

Knows tables and kernels' arguments; how memory is had and kernels are launched is its ``Ground``'s affair.
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

__all__ = ["Addresses", "Bucket", "CudaKernels", "Ground", "Launch"]

ARRANGED = 64  # buckets that pack() and unpack() keep the tables of
BLOCK_BYTES = 32 << 10  # of what a block reduces or fills


class Launch(ABC):
    """One kernel on a number of blocks, ready to run with arguments of which few change."""

    @abstractmethod
    def set(self, index: int, value: float) -> None:
        """Gives one argument another value, from the next run on."""

    @abstractmethod
    def run(self) -> None:
        """Queues it."""


class Addresses(ABC):
    """A table of addresses in the memory that kernels read."""

    address: int

    @abstractmethod
    def fill(self, addresses: Sequence[int]) -> None:
        """What is queued from now on finds these there; costs next to nothing where they are those of last time."""


class Ground(ABC):
    """What buckets stand on: a stream of a device, or what stands in for one."""

    multiprocessors: int

    @abstractmethod
    def constant(self, words: array[int]) -> Any:
        """Memory with these words, which kernels read; ``address`` says where. It lives as long as the reference."""

    @abstractmethod
    def addresses(self, n: int) -> Addresses: ...

    @abstractmethod
    def prepare(self, name: Name, blocks: int, arguments: Sequence[int | float]) -> Launch:
        """Raises DeviceError where the kernel cannot be had."""

    @abstractmethod
    def can_run(self, name: Name) -> bool:
        """Whether ``prepare`` would succeed; where not, ``copier`` serves plain copies."""

    @abstractmethod
    def copier(self, sizes: Sequence[int]) -> Callable[[Sequence[int], Sequence[int]], None]:
        """Copies without a kernel, called with (sources, targets)."""


class Bucket:
    """Packing or unpacking of tensors of these counts, arranged once."""

    def __init__(
        self, ground: Ground, counts: Sequence[int], dtype: DType, wire: DType, scale: float, unpack: bool
    ) -> None:
        source, target = (wire, dtype) if unpack else (dtype, wire)
        name = conversion(source, target, scale)
        self._nothing = not any(counts)
        if self._nothing:
            return
        if name == COPY and not ground.can_run(COPY):
            self.run = _Copies(ground, counts, dtype, unpack).run  # type: ignore[method-assign]  # plain copies need no kernel
            return
        item = max(source.itemsize, target.itemsize)
        per_chunk = chunk_bytes(sum(counts) * item, ground.multiprocessors) // item
        if name == COPY:  # its table is in bytes
            counts = [count * item for count in counts]
            per_chunk *= item
        rows = table(counts, per_chunk)
        self._chunks = ground.constant(rows)
        self._addresses = ground.addresses(len(counts))
        arguments = (self._chunks.address, self._addresses.address, 0, int(unpack), scale)
        self._launch = ground.prepare(name, len(rows) // 4, arguments)

    def run(self, tensors: Sequence[int], flat: int) -> None:
        """Between the tensors at these addresses and the run of elements at ``flat``."""
        if self._nothing:
            return
        self._addresses.fill(tensors)
        self._launch.set(2, flat)
        self._launch.run()


class _Copies:
    """A bucket without a kernel."""

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
    """The kernels contract over a ground; every call is queued there and returns at once."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        # What was arranged for a bucket serves it again: the tables of those used last are kept.
        self._bucket = functools.lru_cache(ARRANGED)(functools.partial(Bucket, ground))
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
    """The element that changes nothing under ``op``, so often that it fills a word; as a signed number."""
    bits = 8 * dtype.itemsize
    word = 0
    for _ in range(64 // bits):
        word = (word << bits) | _identity(dtype, op)
    return word - (1 << 64) if word >> 63 else word


def _identity(dtype: DType, op: ReduceOp) -> int:
    """The bits of that one element."""
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
