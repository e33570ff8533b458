"""The one file that touches CUDA for TensorFlow: where a GPU's tensor lies, memory made into one, the wait for a result.

TensorFlow shows nobody its streams. It waits for its own work when it tells where a tensor is, and so the host has
to wait for ours before TensorFlow sees a result. Nothing is copied.
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

__all__ = ["Gpu", "tensor_at"]

DRIVER = "libcuda.so.1"
DEVICE_ORDINAL = 9  # cuda.h, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
NOT_READY = 600  # cuda.h, CUDA_ERROR_NOT_READY
SPINS = 200  # looks at an event before this thread lets others run in between
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
_Address = ctypes.c_uint64  # the first field of DLPack's tensor is where its data begins


class Gpu:
    """NVIDIA's, of TensorFlow. Any thread."""

    types: frozenset[Any] = frozenset(
        {tf.float16, tf.bfloat16, tf.float32, tf.float64}
    )  # small integers lie on the host

    def place(self, tensor: Any) -> Device | None:
        """Where an eager tensor lies, as CUDA counts; None for what is not served there."""
        name = tensor.backing_device
        if "CPU" in name:
            return CPU
        if tensor.dtype not in self.types or not _GPU.search(name):
            return None
        return _cuda_device(name, tensor)

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        """A new tensor of ``like``'s type and device, whose values are anything."""
        with tf.device(like.backing_device):
            return tf.raw_ops.Empty(shape=list(shape), dtype=like.dtype)

    def wrap(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        """The tensor whose elements stand in ``memory``, which is on ``like``'s device."""
        found = _GPU.search(like.backing_device)
        return tensor_at(memory, shape, dtype, ON_CUDA, int(found.group(1)) if found else 0)

    def settle(self, tensor: Any) -> None:
        """Returns when the GPU that ``tensor`` lies on has done what TensorFlow has given it.

        To ask where a tensor is waits for that too, but lets no other thread run Python meanwhile.
        """
        with tf.device(tensor.backing_device):
            tf.raw_ops.SyncDevice()

    def wait(self, event: int) -> None:
        """Returns when the event of that handle has come. Raises DeviceError where the GPU failed before it."""
        driver = _driver()
        for turn in itertools.count():
            code = driver.cuEventQuery(ctypes.c_void_p(event))
            if code == 0:
                return
            if code != NOT_READY:
                raise DeviceError(f"a result on a GPU does not come: CUDA error {code}; see the log of this rank")
            if turn > SPINS:
                time.sleep(PAUSE_S)


def tensor_at(memory: Memory, shape: Sequence[int], dtype: DType, kind: int, index: int) -> Any:
    """The tensor whose elements stand in ``memory`` of DLPack's device (kind, index); TensorFlow keeps that alive."""
    managed = lend(memory, shape, dtype, (kind, index))
    return _from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


_ordinals: dict[str, Device] = {}  # by TensorFlow's name of a device, which may count otherwise


def _cuda_device(name: str, tensor: Any) -> Device | None:
    device = _ordinals.get(name)
    if device is None:
        try:
            driver = _driver()
        except OSError:  # another maker's GPU
            return None
        if not tensor.shape.num_elements():  # it lies nowhere, and on another rank the same tensor may have elements
            with tf.device(name):
                tensor = tf.raw_ops.Empty(shape=[1], dtype=tf.float32)
        ordinal = ctypes.c_int(-1)
        address = _Address.from_address(_pointer(_to_dlpack(tensor), b"dltensor")).value
        code = driver.cuPointerGetAttribute(ctypes.byref(ordinal), DEVICE_ORDINAL, ctypes.c_uint64(address))
        if code != 0 or ordinal.value < 0:  # another maker's GPU
            return None
        device = _ordinals[name] = Device("cuda", ordinal.value)
    return device


@cache
def _driver() -> Any:
    return ctypes.CDLL(DRIVER)
