"""The kernels for host memory, for callers in Python: make tables of addresses, and call the machine code."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.machine_code.cpu import CPU
from ddlcore.contracts.machine_code.loading import load
from ddlcore.types import DType, ReduceOp

_FUNCTIONS = ("_convert", "_digest", "_mean", "_reduce", "_widen")
_BITS = {
    DType.U8: (0, 8), DType.I8: (1, 8), DType.U16: (0, 16), DType.I16: (1, 16), DType.I32: (1, 32), DType.I64: (1, 64),
}  # fmt: skip
_ONE = {
    DType.F16: b"\x00\x3c",
    DType.BF16: b"\x80\x3f",
    DType.F32: struct.pack("=f", 1),
    DType.F64: struct.pack("=d", 1),
}
_INFINITY = {
    DType.F16: 0x7C00, DType.BF16: 0x7F80, DType.F32: 0x7F800000, DType.F64: 0x7FF0000000000000,
}  # fmt: skip


class CpuKernels(Kernels):
    """The kernels for host memory. Any thread may call them.

    ``cache_dir`` is the cache directory of the machine code; "" means the usual directories. The constructor loads the
    machine code; if no cache contains it, the constructor compiles it, which takes some seconds. If ``late`` is true,
    the code is loaded only at the first call of a kernel, because a job of one rank may never need a kernel.
    """

    def __init__(self, cache_dir: str = "", late: bool = False) -> None:
        self._cache_dir = cache_dir
        if not late:
            self._load()

    def _load(self) -> None:
        code = load(CPU, self._cache_dir)
        vars(self).update({name: code.function(f"ddl{name}") for name in _FUNCTIONS})

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in _FUNCTIONS:
            raise AttributeError(name)
        self._load()
        function: Callable[..., int] = vars(self)[name]
        return function

    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        n = len(sources)
        addresses, lengths = _table(sources), _table(counts)
        self._convert(ctypes.addressof(addresses), ctypes.addressof(lengths), n, dtype, target, wire, scale, 0)

    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        n = len(targets)
        addresses, lengths = _table(targets), _table(counts)
        self._convert(ctypes.addressof(addresses), ctypes.addressof(lengths), n, dtype, source, wire, scale, 1)

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
        addresses = _table(sources)
        self._reduce(ctypes.addressof(addresses), len(sources), target, count, dtype, op, prescale, scale)

    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        if count == 0:
            return
        pattern = _identity(dtype, op)
        ctypes.memmove(target, pattern, len(pattern))
        have, total = len(pattern), count * len(pattern)
        while have < total:
            more = min(have, total - have)
            ctypes.memmove(target + have, target, more)
            have += more

    def widen(self, source: int, count: int, dtype: DType, target: int, scale: float = 1.0) -> None:
        self._widen(source, target, count, dtype, scale)

    def mean(self, source: int, count: int, dtype: DType, target: int, divisor: int, scale: float = 1.0) -> None:
        self._mean(source, target, count, dtype, divisor, scale)

    def digests(self, addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
        """Return the 8-byte digests of memory ranges, one after the other.

        Range i has ``sizes[i]`` bytes at ``addresses[i]``. Two different ranges almost certainly have different
        digests. If the ranges differ in only one 8-byte word, the digests always differ. The digest does not protect
        against deliberate changes.
        """
        out = bytearray(8 * len(addresses))
        where, lengths = _table(addresses), _table(sizes)
        view = (ctypes.c_char * len(out)).from_buffer(out)
        self._digest(ctypes.addressof(where), ctypes.addressof(lengths), len(addresses), ctypes.addressof(view))
        return bytes(out)


def _identity(dtype: DType, op: ReduceOp) -> bytes:
    """Return the bytes of one element of type ``dtype``: the value that does not change a result, such as 0 for Sum."""
    size = dtype.itemsize
    if dtype is DType.BOOL:
        return b"\x01" if op in (ReduceOp.Min, ReduceOp.Product) else b"\x00"
    if op is ReduceOp.Sum:
        return bytes(size)
    if dtype.is_float:
        if op is ReduceOp.Product:
            return _ONE[dtype]
        sign = 1 << (8 * size - 1) if op is ReduceOp.Max else 0
        return (_INFINITY[dtype] | sign).to_bytes(size, "little")
    signed, bits = _BITS[dtype]
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    value = {ReduceOp.Product: 1, ReduceOp.Min: most, ReduceOp.Max: least}[op]
    return value.to_bytes(size, "little", signed=bool(signed))


def _table(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
