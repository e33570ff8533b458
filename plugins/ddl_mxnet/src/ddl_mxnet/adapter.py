"""The adapter for MXNet: describes the memory of MXNet arrays, and makes MXNet arrays from memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ddl_mxnet.devices import is_on_gpu
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.dlpack import lend
from ddlcore.contracts.transport import Memory
from ddlcore.errors import InvalidArgument
from ddlcore.types import CPU, Buffer, DType

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # the NumPy type that MXNet uses for bfloat16
_CODES = {  # the type codes of MXNet (mshadow)
    DType.F32: 0,
    DType.F64: 1,
    DType.F16: 2,
    DType.U8: 3,
    DType.I32: 4,
    DType.I8: 5,
    DType.I64: 6,
    DType.BOOL: 7,
    DType.BF16: 12,
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_NATIVE: dict[DType, Any] = {dtype: BFLOAT16 if dtype is DType.BF16 else np.dtype(dtype.label) for dtype in _CODES}
_KNOWN = ", ".join(sorted(dtype.label for dtype in _CODES))
_DLPACK = {DType.BOOL: (1, 1)}  # the code and number of bits that MXNet's DLPack import expects
_DENSE = 0  # the storage type of dense arrays
_REACHED = (1, 3, 5)  # device types whose memory this process can read: CPU, pinned, shared


class MxnetAdapter(Adapter):
    """The adapter for dense arrays of ``mx.nd`` and ``mx.np`` in host memory.

    ``buffer`` waits until MXNet's engine has run all operators that read or write the array.
    """

    name = "mxnet"

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        dtype = dtype_of(tensor)
        # Wait for pending reads too, not only for writes: the result may be written to this memory.
        check_call(_LIB.MXNDArrayWaitToWrite(tensor.handle))
        shape = tuple(tensor.shape)
        return Buffer(_waited_address(tensor), count_of(shape), dtype, shape, None, CPU, tensor)

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        return _empty(like, tuple(like.shape if shape is None else shape), dtype_of(like))

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        if count_of(shape) == 0:
            return _empty(like, tuple(shape), dtype)
        made = _adopted(memory, tuple(shape), dtype, type(like))
        return made.as_in_context(like.ctx) if is_on_gpu(like) else made

    def copy(self, source: Any, target: Any) -> None:
        source.copyto(target)


def dtype_of(tensor: Any, *, anywhere: bool = False) -> DType:
    """Return the element type of ``tensor``, after a check that ddl can run collectives on it.

    Raises ValueError if ``tensor`` is not a dense MXNet array, if its element type is not supported, or if no transport
    can read its memory. The message says what the user can do. If ``anywhere`` is true, arrays on a GPU are accepted
    too, because the caller copies them to the host.
    """
    if not isinstance(tensor, mx.nd.NDArray):
        way = "make one: mx.nd.array(...)"
        if isinstance(tensor, mx.sym.Symbol):
            way = "a block that calls ddl cannot be hybridized: leave hybridize() out for it"
        raise InvalidArgument(f"an MXNet NDArray is needed, not {type(tensor).__name__}; {way}")
    handle = tensor.handle
    value = ctypes.c_int()
    check_call(_LIB.MXNDArrayGetStorageType(handle, ctypes.byref(value)))
    if value.value != _DENSE:
        raise InvalidArgument(
            f"Tensor type {tensor.stype} is not supported; ddl carries dense arrays of {_KNOWN}: "
            "pass tensor.tostype('default'), and let layers make dense gradients (sparse_grad=False)"
        )
    device, index = ctypes.c_int(), ctypes.c_int()
    check_call(_LIB.MXNDArrayGetContext(handle, ctypes.byref(device), ctypes.byref(index)))
    if device.value not in _REACHED and not anywhere:
        raise InvalidArgument(
            f"an array of shape {tuple(tensor.shape)} lies on {tensor.ctx}, which no installed transport reaches; "
            "pass tensor.as_in_context(mx.cpu())"
        )
    check_call(_LIB.MXNDArrayGetDType(handle, ctypes.byref(value)))
    dtype = _DTYPES.get(value.value)
    if dtype is None:
        raise InvalidArgument(
            f"Tensor type {tensor.dtype} is not supported; ddl carries {_KNOWN}: pass tensor.astype(...) one of them"
        )
    return dtype


def address_of(handle: Any) -> int | None:
    """Return the address of an array's memory; None if the library oneDNN stores the array in a special layout.

    ``handle`` is MXNet's handle of the array. This function never waits for MXNet's engine, so threads of the engine
    may call it. If a thread of the engine called ``MXNDArrayGetData`` instead, there would be a deadlock: the thread
    would wait for the engine, and the engine would wait for this thread.
    """
    exported = ctypes.c_void_p()
    if _LIB.MXNDArrayToDLPack(handle, ctypes.byref(exported)) != 0:
        return None
    address = ctypes.c_void_p.from_address(exported.value or 0).value  # a DLManagedTensor begins with its data
    _LIB.MXNDArrayCallDLPackDeleter(exported)
    return address or 0


def apart(arrays: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """Return one array for each piece of memory in ``arrays``, and leave out memory that ``others`` also use.

    If several arrays are views of the same memory, the first one is returned. Reason: all views of an array are the
    same variable in MXNet's engine. If an operation had the same variable twice, the engine would wait forever.
    """
    known = {_memory_of(array) for array in others}
    chosen = []
    for array in arrays:
        memory = _memory_of(array)
        if memory not in known:
            known.add(memory)
            chosen.append(array)
    return chosen


def overlapping(arrays: Sequence[Any]) -> set[int]:
    """Return the indices in ``arrays`` of the arrays that share memory with another array of ``arrays``.

    The arrays must be dense and in host memory. The function waits until all of them are computed, because it compares
    addresses. So it also finds arrays that are not views of each other, but were made from the same NumPy array.
    """
    spans = []
    for place, array in enumerate(arrays):
        nbytes = count_of(array.shape) * np.dtype(array.dtype).itemsize
        if nbytes:
            check_call(_LIB.MXNDArrayWaitToWrite(array.handle))  # before the address is read, see docs/design/mxnet.md
            begin = _waited_address(array)
            spans.append((begin, begin + nbytes, place))
    spans.sort()
    found: set[int] = set()
    reached, last = 0, -1  # the end of the memory seen so far, and the index of the array that ends there
    for begin, end, place in spans:
        if begin < reached:
            found |= {last, place}
        if end > reached:
            reached, last = end, place
    return found


def _memory_of(array: Any) -> int | None:
    """Return a number that is the same for all arrays that are views of the same memory.

    This works only if ``_has_memory_first`` is true. If it is false, the number is the handle of the array, which is
    different for each view.
    """
    handle: int | None = array.handle.value
    return _first_word(handle) if _has_memory_first() else handle


def _first_word(address: int | None) -> int | None:
    return ctypes.c_void_p.from_address(address or 0).value


@cache
def _has_memory_first() -> bool:
    """Return whether the NDArray object of this MXNet begins with a pointer to its memory, as in MXNet 1.9.1.

    This pointer shows whether two arrays are views of the same memory. MXNet has no function that tells this.
    """
    whole, other = mx.nd.zeros((2, 1)), mx.nd.zeros((2, 1))
    words = [_first_word(array.handle.value) for array in (whole, whole[1:], whole.reshape((1, 2)), other)]
    return words[0] == words[1] == words[2] != words[3] and None not in words


def _adopted(memory: Memory, shape: tuple[int, ...], dtype: DType, kind: Any) -> Any:
    tensor = lend(memory, shape, dtype, codes=_DLPACK)
    handle = mx.base.NDArrayHandle()
    with mx.util.np_shape(True):
        check_call(_LIB.MXNDArrayFromDLPackEx(ctypes.byref(tensor), True, ctypes.byref(handle)))
    return kind(handle)


def _waited_address(tensor: Any) -> int:
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(address)))
    return address.value or 0


def count_of(shape: Sequence[int]) -> int:
    """Return the number of elements of an array with the shape ``shape``."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def _empty(like: Any, shape: tuple[int, ...], dtype: DType) -> Any:
    """Return a new array of ``shape`` and ``dtype``, with the class and the context of ``like``.

    The values of the array are not initialized.
    """
    with mx.util.np_shape(True):  # MXNet has scalars and arrays without elements only in this mode
        made = type(like)(mx.nd.ndarray._new_alloc_handle(shape, like.ctx, False, _NATIVE[dtype]))
    return made
