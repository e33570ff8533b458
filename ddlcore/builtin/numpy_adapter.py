"""The adapter for numpy: describes the memory of numpy arrays, and makes numpy arrays from memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.transport import Memory
from ddlcore.errors import InvalidArgument
from ddlcore.types import BF16_NAME, Buffer, DType, carrier_of, known_types

# Only types in native byte order: a byte-swapped dtype is a different key and is not found here.
_DTYPES: dict[Any, DType] = {np.dtype(dtype.label): dtype for dtype in DType if dtype is not DType.BF16}
_NUMPY = {dtype: native for native, dtype in _DTYPES.items()}
_BYTE: Any = ctypes.c_char  # Any: mypy does not know that an array of this version of numpy is a buffer


def _is_masked(array: Any) -> bool:
    """Return whether ``array`` has masked elements. Imports nothing, because a signal handler may call this function.

    numpy 2.5 imports numpy.ma when a program first uses it. Until then, there is no masked array.
    """
    # While another thread imports the module, the class may be missing.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked is not None and isinstance(array, masked)


class NumpyAdapter(Adapter):
    """The adapter for numpy arrays in process memory, including bfloat16 if the package ml_dtypes is installed."""

    name = "numpy"

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        if type(tensor) is not np.ndarray and (not isinstance(tensor, np.ndarray) or _is_masked(tensor)):
            raise InvalidArgument(
                f"a numpy array is needed, not {type(tensor).__name__}; convert it with np.asarray(...)"
            )
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            carried = _as_carrier(tensor)
            if carried is not None:
                return replace(self.buffer(carried, elementwise=elementwise), element=tensor.dtype.name)
            dtype = _other_dtype(tensor.dtype)
        flags = tensor.flags
        if not flags.aligned:
            raise InvalidArgument(
                f"an array of shape {tensor.shape} begins in the middle of an element; pass a copy of it (.copy())"
            )
        strides = None
        is_dense = flags.c_contiguous
        if is_dense and flags.writeable and tensor.size and dtype is not DType.BF16:
            # numpy's own ways to the address make a dict or an object with many methods, and take three times as long.
            address = ctypes.addressof(_BYTE.from_buffer(tensor))
        else:
            address = tensor.__array_interface__["data"][0]
        if not is_dense:
            strides = _dense_strides(tensor)
            if strides is None or not elementwise:
                raise InvalidArgument(
                    f"an array of shape {tensor.shape} with strides {tensor.strides} is not contiguous; "
                    "pass np.ascontiguousarray(array)"
                )
        return Buffer(address, tensor.size, dtype, tensor.shape, strides, owner=tensor)

    def address(self, tensor: Any, like: Buffer) -> int | None:
        if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
            return None  # its address may be that of a former writable array, but require_writable() must refuse it
        return super().address(tensor, like)

    def require_writable(self, tensor: Any) -> None:
        if not tensor.flags.writeable:
            raise InvalidArgument(
                f"an array of shape {tensor.shape} is read-only, and this call writes to it; pass a copy of it "
                "(.copy()), or use the verb that returns a new array (without the underscore, without output=)"
            )

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        if shape is None:
            return np.empty_like(like, subok=False)  # keeps a dense layout
        return np.empty(tuple(shape), like.dtype)

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        count = 1
        for extent in shape:
            count *= extent
        native = _numpy_dtype(dtype, like)
        if count == 0:  # frombuffer refuses an empty buffer
            return np.empty(tuple(shape), native)
        held: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(memory.address)
        held.memory = memory  # the array keeps ``held`` alive, and ``held`` keeps the memory alive
        array = np.frombuffer(held, native)
        return array if len(shape) == 1 else array.reshape(tuple(shape))

    def restore(self, tensor: Any, like: Any) -> Any:
        array = tensor.view(like.dtype)
        return array if array.shape == tensor.shape else array[..., 0]

    def copy(self, source: Any, target: Any) -> None:
        target[...] = source


def _as_carrier(array: Any) -> Any:
    """Return the memory of ``array`` as an array of the type that carries its elements; None if no other type does."""
    carrier = carrier_of(array.dtype.name)
    if carrier is None or not array.dtype.isnative:
        return None
    return (array[..., None] if carrier.is_complex else array).view(_NUMPY[carrier.dtype])


def _other_dtype(dtype: Any) -> DType:
    """Return the DType for a numpy dtype that is not in the table ``_DTYPES``, such as bfloat16 of ml_dtypes.

    Raises InvalidArgument if ddl does not support the dtype. The message says what the user can do.
    """
    if not dtype.isnative:
        raise InvalidArgument(f"array type {dtype.str} has foreign byte order; pass array.astype({dtype.name!r})")
    if dtype.name == BF16_NAME:
        return DType.BF16
    try:
        return DType.of(dtype.name)
    except ValueError:
        raise InvalidArgument(f"tensor type {dtype.name} is not supported; ddl carries {known_types()}") from None


def _numpy_dtype(dtype: DType, like: Any) -> Any:
    if dtype is not DType.BF16:
        return _NUMPY[dtype]
    if isinstance(like, np.ndarray) and like.dtype.name == BF16_NAME:
        return like.dtype
    try:
        return np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise InvalidArgument("numpy has no bfloat16 of its own; pip install ml_dtypes") from error


def _dense_strides(array: Any) -> tuple[int, ...] | None:
    """Return the strides of ``array`` in elements, or None if there are gaps between the elements in memory.

    The axes may be in any order in memory. The stride of an axis with one element has no meaning. Such a stride is
    returned as 1, so that equal layouts compare equal.
    """
    strides = [1] * array.ndim
    expected = 1
    for axis in sorted(range(array.ndim), key=lambda axis: array.strides[axis]):
        if array.shape[axis] == 1:
            continue
        if array.strides[axis] != expected * array.itemsize:
            return None
        strides[axis] = expected
        expected *= array.shape[axis]
    return tuple(strides)
