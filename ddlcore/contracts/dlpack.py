"""Lends memory to a framework as a DLPack tensor, for adapters of frameworks that cannot use a plain address.

The structure is defined in dlpack.h, the header of the DLPack protocol, version 0.x: a DLManagedTensor, which begins
with a DLTensor.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence

from ddlcore.contracts.transport import Memory
from ddlcore.types import DType

__all__ = ["ON_CPU", "ON_CUDA", "LentTensor", "lend"]

ON_CPU, ON_CUDA = 1, 2  # DLDeviceType
_SIGNED, _UNSIGNED, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6  # DLDataTypeCode
_SPECIAL = {DType.BF16: _BFLOAT, DType.BOOL: _BOOL, DType.U8: _UNSIGNED, DType.U16: _UNSIGNED}


class LentTensor(ctypes.Structure):
    """The C structure DLManagedTensor. The adapter passes the address of this structure to the framework."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int * 2),  # kind, index
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def lend(
    memory: Memory,
    shape: Sequence[int],
    dtype: DType,
    device: tuple[int, int] = (ON_CPU, 0),
    codes: Mapping[DType, tuple[int, int]] | None = None,
) -> LentTensor:
    """Return a row-major DLPack tensor whose elements are in ``memory``.

    The memory stays alive until the framework calls the tensor's deleter. So the caller must pass the tensor to the
    framework: if the deleter is never called, the memory is never freed. ``device``: DLPack's device type and the index
    of the device. ``codes``: DLPack's type code and number of bits for those element types that the framework encodes
    in a non-standard way; None: there are no such types. Any thread may call this.
    """
    kind = _SPECIAL.get(dtype, _FLOAT if dtype.is_float else _SIGNED)
    code, bits = (codes or {}).get(dtype, (kind, 8 * dtype.itemsize))
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    number = next(_numbers)
    where = (ctypes.c_int * 2)(*device)
    tensor = LentTensor(memory.address, where, len(shape), code, bits, 1, extents, None, 0, number, _deleter_address)
    _lent[number] = (memory, extents, tensor)
    return tensor


def _let_go(tensor: int) -> None:
    """Release the memory of a LentTensor. The framework calls this when none of its tensors uses the memory any more.

    ``tensor``: the address of the LentTensor.
    """
    _lent.pop(LentTensor.from_address(tensor).context, None)


_lent: dict[int | None, object] = {}
_numbers = itertools.count(1)
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_let_go)
_deleter_address = ctypes.cast(_deleter, ctypes.c_void_p)
