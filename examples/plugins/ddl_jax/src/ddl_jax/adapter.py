"""Turns JAX arrays on the CPU into buffers, and memory into JAX arrays, by DLPack without a copy.

JAX's arrays are immutable; ddl writes only into arrays that it has made itself, before anybody else has them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from ddl_jax.dlpack import Exported, address_of
from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.transport import Memory
from ddlcore.types import Buffer, DType

__all__ = ["JaxAdapter"]

_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class JaxAdapter(Adapter):
    """The adapter of JAX arrays on one CPU device, which are always row-major."""

    name = "jax"

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        if isinstance(tensor, jax.core.Tracer):
            raise ValueError("a JAX array is traced here; call ddl outside of jax.jit and its kin")
        if not isinstance(tensor, jax.Array):
            raise ValueError(
                f"a JAX array is needed, not {type(tensor).__name__}; make one with jax.numpy.asarray(...)"
            )
        dtype = DType.of(tensor.dtype.name)
        devices = list(tensor.devices())
        if len(devices) > 1 or devices[0].platform != "cpu":
            raise ValueError(
                f"the array lies on {devices}; put it on one CPU: jax.device_put(x, jax.devices('cpu')[0])"
            )
        tensor.block_until_ready()
        address = address_of(tensor) if dtype is not DType.BOOL else tensor.unsafe_buffer_pointer()
        return Buffer(address, tensor.size, dtype, tensor.shape, owner=tensor)

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Any:
        dtype = DType.of(like.dtype.name)
        extents = tuple(like.shape if shape is None else shape)
        return self.adopt(Memory(prod(extents) * dtype.itemsize), extents, dtype, like)

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Any:
        count = prod(shape)
        if not count:
            return jax.numpy.zeros(tuple(shape), _name(dtype))
        raw = np.frombuffer(_held(memory, count * dtype.itemsize), _WIDTHS[dtype.itemsize])
        return jax.dlpack.from_dlpack(Exported(raw.reshape(tuple(shape)), dtype))

    def copy(self, source: Any, target: Any) -> None:
        taken, given = (self.buffer(tensor, elementwise=False) for tensor in (source, target))
        ctypes.memmove(given.address, taken.address, taken.nbytes)


def _name(dtype: DType) -> Any:
    return jax.numpy.dtype(dtype.label)


def _held(memory: Memory, nbytes: int) -> Any:
    """Return the bytes of ``memory`` as an object that keeps ``memory`` alive."""
    held = (ctypes.c_char * nbytes).from_address(memory.address)
    setattr(held, "_ddl_memory", memory)  # noqa: B010  # ctypes' type has no such field
    return held
