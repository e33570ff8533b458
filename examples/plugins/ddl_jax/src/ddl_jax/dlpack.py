"""DLPack in both directions: the address of an array's memory, and memory offered as an array; see dlpack.h, 0.8."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ddlcore.types import DType

__all__ = ["Exported", "address_of"]

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_KINDS = {"i": _INT, "u": _UINT, "f": _FLOAT, "b": _BOOL}
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


def address_of(array: Any) -> int:
    """Return the address of the memory of ``array``, or 0 if it has no elements."""
    capsule = array.__dlpack__()
    tensor = _tensor(capsule)
    begin: int = (tensor.data or 0) + tensor.byte_offset
    return begin


class Exported:
    """Memory that numpy describes as unsigned integers, offered as the type that it really holds."""

    def __init__(self, raw: Any, dtype: DType) -> None:
        self._raw, self._dtype = raw, dtype  # raw: a numpy array of unsigned integers of the same width

    def __dlpack__(self, **keywords: object) -> Any:
        capsule = self._raw.__dlpack__()
        _tensor(capsule).code = _code(self._dtype)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU's memory


def _code(dtype: DType) -> int:
    return _BFLOAT if dtype is DType.BF16 else _KINDS[np.dtype(dtype.label).kind]


def _tensor(capsule: Any) -> _Tensor:
    """Return the DLTensor, the first field of the DLManagedTensor of a capsule that is not yet consumed."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return _Tensor.from_address(pointer(capsule, _NAME))
