"""Memory lent by DLPack, as numpy reads it."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from ddlcore.contracts.dlpack import LentTensor, lend
from ddlcore.contracts.transport import Memory, view
from ddlcore.types import DType

NUMPYS = [dtype for dtype in DType if dtype is not DType.BF16]

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Capsule:
    """What numpy.from_dlpack takes."""

    def __init__(self, tensor: LentTensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        return _capsule(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3), ()])
@pytest.mark.parametrize("dtype", NUMPYS, ids=lambda dtype: dtype.label)
def test_the_elements_are_the_memory_s(dtype: DType, shape: Sequence[int]) -> None:
    """Type, shape and values as they stand there; what is written to the one is in the other."""
    memory = Memory(6 * dtype.itemsize)
    there = np.frombuffer(view(memory.address, memory.nbytes), dtype.label)
    there[:] = np.arange(6)
    seen = np.from_dlpack(Capsule(lend(memory, shape, dtype)))
    assert (seen.dtype, seen.shape) == (there.dtype, tuple(shape))
    assert (seen.reshape(-1) == there[: seen.size]).all()
    there[0] = 1
    assert seen.reshape(-1)[0] == there[0]


def test_memory_stays_as_long_as_a_tensor_over_it() -> None:
    """And no longer."""

    memory = Memory(32)
    alive = weakref.ref(memory)
    seen = np.from_dlpack(Capsule(lend(memory, (4,), DType.F64)))
    rest = seen[1:]
    del memory, seen
    gc.collect()
    assert alive() is not None
    del rest
    gc.collect()
    assert alive() is None
