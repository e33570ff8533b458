"""A world of threads with CUDA devices but no GPU: one fake driver for the process, and tensors on its devices."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from ddl_nccl.cuda.queue import CudaQueue
from ddl_nccl.cuda.runtime import CudaDevice

from ddlcore.contracts.adapter import Adapter
from ddlcore.contracts.transport import Memory
from ddlcore.hooks import KernelsProvider
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.plug.settings import settings_of
from ddlcore.types import Buffer, Device, DType
from plugins.ddl_nccl.tests.cuda.fake import FakeDriver, fake_code
from plugins.ddl_nccl.tests.cuda.oracle import Array, native

__all__ = ["FakeAdapter", "FakeCuda", "Tensor", "leave", "registry"]

_orders = itertools.count(1)
_mine = threading.local()
WAIT_S = 30.0


class FakeCuda(CudaDevice):
    """A CudaDevice that uses the driver of the current test."""

    shared: FakeDriver

    def __init__(self) -> None:
        super().__init__(self.shared, fake_code)

    @classmethod
    def count(cls) -> int:
        return cls.shared.count()


def registry() -> Registry:
    """Return a registry of everything installed, in which FakeCuda replaces ddl_nccl's devices."""
    _, found = settings_of(os.environ)
    found.offer(
        KernelsProvider(name="fake-cuda", target=f"{__name__}:FakeCuda", device="cuda", priority=99),
        Distribution("ddlcore", "tests"),
    )
    return found


def stream() -> tuple[CudaDevice, CudaQueue]:
    """Return the calling thread's own device and stream, such as a framework has."""
    if not hasattr(_mine, "stream"):
        device = FakeCuda()
        device.open(Device("cuda", 0))
        _mine.stream = (device, device.queue())
    found: tuple[CudaDevice, CudaQueue] = _mine.stream
    return found


class Tensor:
    """A row-major tensor on cuda:0, whose operations are queued on the thread's own stream."""

    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: DType) -> None:
        self.memory, self.shape, self.dtype = memory, shape, dtype
        self.count = int(np.prod(shape))

    @classmethod
    def of(cls, array: Array) -> Tensor:
        device, queue = stream()
        tensor = cls(device.allocate(array.nbytes), array.shape, DType.of(array.dtype.name))
        pinned = device.pinned(array.nbytes)
        ctypes.memmove(pinned.address, array.ctypes.data, array.nbytes)
        queue.copy(pinned.address, tensor.memory.address, array.nbytes)
        return tensor

    def numpy(self) -> Array:
        out = np.empty(self.shape, native(self.dtype))
        _, queue = stream()
        queue.copy(self.memory.address, out.ctypes.data, out.nbytes)
        assert queue.record().wait(WAIT_S)
        return out


class FakeAdapter(Adapter):
    """An adapter whose every buffer carries an event of the calling thread's stream."""

    name = "fake"

    def buffer(self, tensor: Any, *, elementwise: bool) -> Buffer:
        _, queue = stream()
        event = queue.record()
        return Buffer(
            tensor.memory.address,
            tensor.count,
            tensor.dtype,
            tensor.shape,
            device=Device("cuda", 0),
            owner=(tensor, event),
            event=event.handle,
            stream=queue.handle,
            order=next(_orders),
        )

    def allocate(self, like: Any, shape: Sequence[int] | None = None) -> Tensor:
        shape = like.shape if shape is None else tuple(shape)
        return Tensor(stream()[0].allocate(int(np.prod(shape)) * like.dtype.itemsize), shape, like.dtype)

    def adopt(self, memory: Memory, shape: Sequence[int], dtype: DType, like: Any) -> Tensor:
        return Tensor(memory, tuple(shape), dtype)

    def copy(self, source: Any, target: Any) -> None:
        stream()[1].copy(source.memory.address, target.memory.address, source.count * source.dtype.itemsize)

    def after(self, event: int, tensors: Sequence[Any]) -> None:
        stream()[1].wait_for(event)


def leave() -> None:
    """Close the calling thread's stream and device."""
    if hasattr(_mine, "stream"):
        device, queue = _mine.stream
        del _mine.stream
        queue.close(WAIT_S)
        device.close()
