"""Uses CUDA for TensorFlow: finds the device of a tensor, makes tensors from memory, and waits for results.

No other file of this package uses CUDA. TensorFlow exposes none of its CUDA streams. When a tensor's address is
requested, TensorFlow waits for its own work. Before TensorFlow may use a result, the host must wait for ddl's work.
Nothing is copied.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from ddlcore.contracts.dlpack import ON_CUDA, lend
from ddlcore.contracts.transport import Memory
from ddlcore.errors import DeviceError
from ddlcore.types import CPU, Device, DType

DRIVER = "libcuda.so.1"
DEVICE_ORDINAL = 9  # cuda.h, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
NOT_READY = 600  # cuda.h, CUDA_ERROR_NOT_READY
SPINS = 200  # queries of an event before this thread sleeps between them
PAUSE_S = 50e-6
_GPU = re.compile(r"device:GPU:(\d+)$")

_to_dlpack = tf.experimental.dlpack.to_dlpack
_from_dlpack = tf.experimental.dlpack.from_dlpack
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_Address = ctypes.c_uint64  # the first field of a DLPack tensor is the address of its data


class GpuFunctions:
    """The functions for TensorFlow's tensors on NVIDIA GPUs. Any thread may call the methods."""

    types: frozenset[Any] = frozenset(
        {tf.float16, tf.bfloat16, tf.float32, tf.float64}
    )  # TensorFlow keeps small integers in host memory

    def place(self, tensor: Any) -> Device | None:
        """Return the CUDA device of an eager tensor, or CPU if the tensor is in host memory.

        Returns None if the tensor's type or device is not supported here.
        """
        name = tensor.backing_device
        if "CPU" in name:
            return CPU
        if tensor.dtype not in self.types or not _GPU.search(name):
            return None
        return _cuda_device(name, tensor)

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """Return a new tensor of the shape ``shape`` with undefined values, with the type and device of ``like``."""
        with tf.device(like.backing_device):
            return tf.raw_ops.Empty(shape=list(shape), dtype=like.dtype)

    def wrap(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """Return a tensor whose elements are in ``memory``, which is on the device of ``like``."""
        found = _GPU.search(like.backing_device)
        return tensor_at(memory, shape, dtype, ON_CUDA, int(found.group(1)) if found else 0)

    def settle(self, tensor: Any) -> None:
        """Wait until the GPU that contains ``tensor`` has finished the work that TensorFlow has given to this GPU.

        Reading the tensor's address would wait for the same work, but without releasing the interpreter's lock.
        """
        with tf.device(tensor.backing_device):
            tf.raw_ops.SyncDevice()

    def wait(self, event: int) -> None:
        """Wait until the CUDA event with the handle ``event`` has occurred.

        Raises DeviceError if the GPU fails before the event occurs.
        """
        driver = _driver()
        for turn in itertools.count():
            code = driver.cuEventQuery(ctypes.c_void_p(event))
            if code == 0:
                return
            if code != NOT_READY:
                raise DeviceError(f"waiting for a result on a GPU failed: CUDA error {code}; see the log of this rank")
            if turn > SPINS:
                time.sleep(PAUSE_S)


def tensor_at(memory: Memory, shape: Sequence[int], dtype: DType, kind: int, index: int) -> Any:
    """Return a tensor whose elements are in ``memory``.

    DLPack identifies the tensor's device by ``kind`` and ``index``. TensorFlow keeps ``memory`` alive.
    """
    managed = lend(memory, shape, dtype, (kind, index))
    return _from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


_ordinals: dict[str, Device] = {}  # by TensorFlow's device name; its numbers may differ from CUDA's


def _cuda_device(name: str, tensor: Any) -> Device | None:
    device = _ordinals.get(name)
    if device is None:
        try:
            driver = _driver()
        except OSError:  # there is no CUDA driver: a GPU of another vendor
            return None
        # A tensor without elements has no address to ask CUDA about. It needs a device all the same, because on another
        # rank the same tensor may have elements.
        if not tensor.shape.num_elements():
            with tf.device(name):
                tensor = tf.raw_ops.Empty(shape=[1], dtype=tf.float32)
        ordinal = ctypes.c_int(-1)
        capsule = _to_dlpack(tensor)  # it must have a name, see ``adapter._address``
        address = _Address.from_address(_pointer(capsule, b"dltensor")).value
        code = driver.cuPointerGetAttribute(ctypes.byref(ordinal), DEVICE_ORDINAL, ctypes.c_uint64(address))
        if code != 0 or ordinal.value < 0:  # not CUDA's memory: a GPU of another vendor
            return None
        device = _ordinals[name] = Device("cuda", ordinal.value)
    return device


@cache
def _driver() -> Any:
    return ctypes.CDLL(DRIVER)
