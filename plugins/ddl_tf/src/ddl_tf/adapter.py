"""Describes eager TensorFlow tensors as memory, and makes eager tensors from memory.

NumPy arrays are accepted as tensors too: inside a running graph, TensorFlow passes its tensors as arrays. This module
runs no collective and computes no gradient.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from ddl_tf.devices import HOST
from ddl_tf.gpu import GpuFunctions
from ddlcore.contracts import Adapter, JobService, Memory
from ddlcore.errors import DeviceError, InvalidArgument, PluginError
from ddlcore.types import CPU, Buffer, Device, DType, carrier_of, known_types

log = logging.getLogger("ddl")

_TF: dict[DType, Any] = {dtype: tf.dtypes.as_dtype(dtype.label) for dtype in DType}
_DTYPES = {native: dtype for dtype, native in _TF.items()}
_ARRAY_DTYPES = {np.dtype(native.as_numpy_dtype): dtype for dtype, native in _TF.items()}
_ARRAYS = {dtype: native for native, dtype in _ARRAY_DTYPES.items()}
# The numpy type for memory of each type. numpy has no bfloat16, so uint16 is used for it.
_NUMPY = {dtype: np.dtype("uint16" if dtype is DType.BF16 else dtype.label) for dtype in DType}

_to_dlpack = tf.experimental.dlpack.to_dlpack
_from_dlpack = tf.experimental.dlpack.from_dlpack
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_Address = ctypes.c_uint64  # the first field of a DLPack tensor is the address of its data


class TfAdapter(Adapter):
    """The adapter for eager tensors in host memory and on GPUs.

    These tensors are always row-major and never move in memory.
    """

    name = "tensorflow"

    def __init__(self) -> None:
        self.gpu = GpuFunctions()
        self._unserved: weakref.WeakKeyDictionary[JobService, set[str]] = weakref.WeakKeyDictionary()  # device kinds

    def range(self, name: str) -> AbstractContextManager[object] | None:
        trace: AbstractContextManager[object] = tf.profiler.experimental.Trace(
            name
        )  # costs almost nothing while no profiler runs
        return trace

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        if isinstance(tensor, np.ndarray):
            return _of_array(tensor)
        dtype = place = None
        if isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor):
            dtype, place = _DTYPES.get(tensor.dtype), self.gpu.place(tensor)
            if dtype is None and place is CPU and carrier_of(tensor.dtype.name) is not None:
                # As an array in the same memory, because TensorFlow has no DLPack of some of these types. Of a scalar,
                # TensorFlow may make a number instead of an array.
                array = np.asarray(tensor if tensor.shape.rank else tf.reshape(tensor, (1,)))
                return _of_array(array.reshape(tuple(tensor.shape.as_list())))
        if dtype is None or place is None:
            raise InvalidArgument(_objection(tensor))
        shape = tuple(tensor.shape.as_list())  # of numbers, also where TensorFlow 1's shapes have Dimensions
        count = 1
        for extent in shape:
            count *= extent
        return Buffer(_address(tensor), count, dtype, shape, None, place, tensor)

    def address(self, tensor: Any, like: Buffer) -> int | None:
        if (
            isinstance(tensor, tf.Tensor)
            and not tf.is_symbolic_tensor(tensor)
            and _DTYPES.get(tensor.dtype) is like.dtype
            and tuple(tensor.shape.as_list()) == like.shape
            and not like.element
            and ("CPU" in tensor.backing_device if like.device is CPU else self.gpu.place(tensor) is like.device)
        ):
            return _address(tensor)
        return super().address(tensor, like)

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        if shape is None:
            shape = like.shape if isinstance(like, np.ndarray) else like.shape.as_list()
        shape = tuple(shape)
        if self._on_gpu(like):
            return self.gpu.empty(like, shape)
        carrier = carrier_of(like.dtype.name)
        if carrier is not None:
            dtype, shape = carrier.dtype, (*shape, 2) if carrier.is_complex else shape
        else:
            dtype = _ARRAY_DTYPES[like.dtype] if isinstance(like, np.ndarray) else _DTYPES[like.dtype]
        count = 1
        for extent in shape:
            count *= extent
        made = self.adopt(Memory(count * dtype.itemsize), shape, dtype, like)
        return made if carrier is None else self.restore(made, like)

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        count = 1
        for extent in shape:
            count *= extent
        arrays = isinstance(like, np.ndarray)
        if self._on_gpu(like):
            return self.gpu.wrap(memory, shape, dtype, like) if count else self.gpu.empty(like, shape)
        if count == 0:  # frombuffer refuses empty memory
            with tf.device(HOST):
                return np.empty(tuple(shape), _ARRAYS[dtype]) if arrays else tf.zeros(shape, _TF[dtype])
        held: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(memory.address)
        held.memory = memory  # the tensor holds the array, the array holds ``held``, ``held`` holds the memory
        if arrays:
            return np.frombuffer(held, _ARRAYS[dtype]).reshape(tuple(shape))
        array = np.frombuffer(held, _NUMPY[dtype]).reshape(tuple(shape))
        tensor = _from_dlpack(array.__dlpack__())  # TensorFlow's kernels need 64-byte alignment, which Memory has
        return tf.bitcast(tensor, tf.bfloat16) if dtype is DType.BF16 else tensor

    def restore(self, tensor: Any, like: Any) -> Any:
        if isinstance(like, np.ndarray):
            array = tensor.view(like.dtype)
            return array if array.shape == tensor.shape else array[..., 0]
        with tf.device(HOST):
            if like.dtype.name.startswith("float8"):  # no operation of TensorFlow makes them of others: copied
                return tf.convert_to_tensor(tensor.numpy().view(like.dtype.as_numpy_dtype))
            return tf.bitcast(tensor, like.dtype)

    def copy(self, source: Any, target: Any) -> None:
        there, here = (self.buffer(tensor, elementwise=True) for tensor in (target, source))
        if (there.shape, there.label) != (here.shape, here.label):
            raise InvalidArgument(f"copy of {here.label}{list(here.shape)} into {there.label}{list(there.shape)}")
        if here.count:
            ctypes.memmove(there.address, here.address, here.nbytes)

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        self.gpu.wait(event)  # TensorFlow exposes no stream that could wait instead

    def settle(self, tensor: Any) -> None:
        """Wait until the GPU of ``tensor`` has finished TensorFlow's work. Other threads may run during the wait.

        This method does nothing for a tensor in host memory. One call costs about as much as a TensorFlow operation.
        """
        if self._on_gpu(tensor):
            self.gpu.settle(tensor)

    def serves(self, job: JobService, place: Device | None) -> bool:
        """Return whether tensors on the device ``place`` may stay there: only if a transport of ``job`` reaches them.

        If they may not, this method logs the reason once for each kind of device. ``place`` is None for a device that
        is not supported.
        """
        if place is None or place is CPU:
            return place is CPU
        unserved = self._unserved.setdefault(job, set())
        if place.kind in unserved:
            return False
        try:
            job.device_label(place)
        except (PluginError, DeviceError) as error:
            unserved.add(place.kind)
            log.info("rank %d: TensorFlow's tensors on %s are staged on the host: %s", job.rank, place, error)
            return False
        return True

    def _on_gpu(self, like: Any) -> bool:
        return isinstance(like, tf.Tensor) and self.gpu.place(like) not in (CPU, None)


def brought(adapter: TfAdapter, job: JobService, tensors: Sequence[Any], stage_on_host: bool = False) -> list[Any]:
    """Return ``tensors`` unchanged if all are in host memory, or all on one device that a transport of ``job`` reaches.

    Otherwise, or if ``stage_on_host`` is true, return all of them in host memory.
    """
    places = {adapter.gpu.place(tensor) for tensor in tensors if _is_eager(tensor)}
    if places <= {CPU}:
        return list(tensors)
    if len(places) == 1 and not stage_on_host and adapter.serves(job, *places):
        return list(tensors)
    return [on_host(tensor) for tensor in tensors]


def is_carried(dtype: Any) -> bool:
    """Return whether collectives take tensors of TensorFlow's type ``dtype``."""
    return dtype in _DTYPES or carrier_of(dtype.name) is not None


def on_host(tensor: Any) -> Any:
    """Return ``tensor`` itself if it is in host memory, otherwise a copy in host memory."""
    if not _is_eager(tensor) or "CPU" in tensor.backing_device:
        return tensor
    return tensor.cpu()


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor)


def _of_array(array: Any) -> Buffer:
    """Return the description of the memory of a numpy array, which TensorFlow passes for a tensor in a running graph."""
    dtype, carrier = _ARRAY_DTYPES.get(array.dtype), carrier_of(array.dtype.name)
    address, count, shape, element = array.__array_interface__["data"][0], array.size, array.shape, ""
    if carrier is not None:
        dtype, element = carrier.dtype, array.dtype.name
        count, shape = count * carrier.parts, (*shape, 2) if carrier.is_complex else shape
    if dtype is None or not array.flags.c_contiguous:
        raise InvalidArgument(
            f"an array of {array.dtype} or its layout is not supported; pass tf.convert_to_tensor(array)"
        )
    return Buffer(address, count, dtype, shape, None, CPU, array, element=element)


def _address(tensor: Any) -> int:
    """Return the address of an eager tensor's elements.

    If TensorFlow runs asynchronously, this function waits until TensorFlow has computed the tensor.
    """
    capsule = _to_dlpack(tensor)  # frees what the pointer points to when it is collected, so it must have a name
    return int(_Address.from_address(_pointer(capsule, b"dltensor")).value)


def _objection(tensor: Any) -> str:
    """Return a message for the user: why no transport accepts ``tensor``, and how to make a tensor that can be sent."""
    if isinstance(tensor, tf.IndexedSlices):
        return "tf.IndexedSlices have no dense memory; pass tf.convert_to_tensor(slices), or allreduce them"
    if not isinstance(tensor, tf.Tensor):
        return f"a TensorFlow tensor is needed, not {type(tensor).__name__}; make one: tf.convert_to_tensor(...)"
    if tf.is_symbolic_tensor(tensor):
        return (
            f"{tensor} is symbolic and has no values yet; call ddl_tf's functions, which add an operation to its graph"
        )
    what = f"a tensor of shape {tuple(tensor.shape.as_list())}"
    if not is_carried(tensor.dtype):
        way = "tf.cast(tensor, ...) to one of them"
        return f"Tensor type {tensor.dtype.name} is not supported; ddl carries {known_types()}: pass {way}"
    return f"{what} lies on {tensor.backing_device}, which no installed transport reaches; pass tensor.cpu()"
