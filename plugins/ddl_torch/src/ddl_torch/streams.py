"""The one file that touches CUDA's streams: when a tensor stands, and how torch waits for what ddl's own queue does.

torch has no way to wait for an event that is not its own, so that one call goes to the driver.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch

from ddlcore.errors import DeviceError, InvalidArgument
from ddlcore.types import CPU, Buffer, Device

__all__ = ["CudaStreams", "Mark", "Streams"]

KIND = "cuda"
DRIVER = "libcuda.so.1"
CAPTURING = (
    "a collective cannot be captured in a CUDA graph: other ranks take part in it, each time, by calls of their hosts; "
    "capture what lies between collectives (torch.cuda.make_graphed_callables), not the backward pass of a "
    "DistributedOptimizer's parameters, nor a wait for its gradients"
)


class Mark(Protocol):
    """A moment of a stream that can be taken again and again: one event, made once."""

    def set(self, buffer: Buffer) -> None:
        """``buffer`` stands when all has run that the calling thread has put on its current stream so far."""


class Streams(Protocol):
    """What an adapter asks of a kind of device. Any thread."""

    def place(self, tensor: torch.Tensor) -> Device | None:
        """Where the tensor lies: CPU, or a device whose streams these are; None for any other."""

    def mark(self, device: Device) -> Mark:
        """A new one."""

    def hold(self, buffer: Buffer) -> None:
        """Marks ``buffer`` as ``Mark.set`` does, with an event that comes back to the pool with the buffer's owner."""

    def after(self, event: int, tensors: Sequence[torch.Tensor]) -> None:
        """The calling thread's current streams go on behind the event of that handle; the host does not wait."""


class CudaStreams(Streams):
    """Those of NVIDIA's GPUs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = itertools.count(1)
        self._free: dict[Device, list[_CudaMark]] = {}
        self._places: dict[int, Device] = {}  # by index, of all GPUs that tensors have been seen on

    def place(self, tensor: torch.Tensor) -> Device | None:
        if tensor.is_cpu:
            return CPU
        if not tensor.is_cuda or torch.version.hip is not None:
            return None
        index = tensor.get_device()
        place = self._places.get(index)
        if place is None:
            place = self._places.setdefault(index, Device(KIND, index))
        return place

    def mark(self, device: Device) -> _CudaMark:
        return _CudaMark(device.index, self._lock, self._orders)

    def hold(self, buffer: Buffer) -> None:
        free = self._free.setdefault(buffer.device, [])
        try:
            mark = free.pop()
        except IndexError:
            mark = self.mark(buffer.device)
        mark.set(buffer)
        buffer.owner = _Held(buffer.owner, mark, free)

    def after(self, event: int, tensors: Sequence[torch.Tensor]) -> None:
        _refuse_capture()
        indexes: Iterable[int] = {tensor.get_device() for tensor in tensors} or tuple(self._places)
        for index in indexes:
            stream = torch.cuda.current_stream(index)
            _wait(index, stream.cuda_stream, event)
            for tensor in tensors:
                if tensor.get_device() == index:
                    with suppress(RuntimeError):  # torch's allocators other than the usual one refuse foreign memory
                        tensor.record_stream(stream)  # of no effect where it was allocated on this very stream


class _CudaMark(Mark):
    """An event of torch's, which it makes when it is first recorded."""

    __slots__ = ("_event", "_index", "_lock", "_orders")

    def __init__(self, index: int, lock: threading.Lock, orders: Any) -> None:
        self._event = torch.cuda.Event()
        self._index = index
        self._lock = lock
        self._orders = orders

    def set(self, buffer: Buffer) -> None:
        _refuse_capture()
        stream = torch.cuda.current_stream(self._index)
        with self._lock:  # of two events of one stream, the one with the greater number comes later
            self._event.record(stream)
            buffer.order = next(self._orders)
        buffer.stream = stream.cuda_stream
        buffer.event = self._event.cuda_event


class _Held:
    """A tensor, and the mark of it, which is free for another when nobody looks at this one any more."""

    __slots__ = ("_free", "_mark", "tensor")

    def __init__(self, tensor: object, mark: _CudaMark, free: list[_CudaMark]) -> None:
        self.tensor = tensor
        self._mark = mark
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._mark)


def _refuse_capture() -> None:
    """An event of a capture is none of the device's: who waited for it would become part of the graph."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(CAPTURING)


# --- the driver


def _wait(index: int, stream: int, event: int) -> None:
    """What is put on ``stream`` from now on waits for ``event``."""
    driver = _driver()
    # The default stream, whose handle is 0, is that of the context; a thread that is new to CUDA has none.
    _check(driver, driver.cuCtxPushCurrent_v2(_context(index)))
    try:
        _check(driver, driver.cuStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event), 0))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def _driver() -> Any:
    return ctypes.CDLL(DRIVER)


@cache
def _context(index: int) -> ctypes.c_void_p:
    """The one that torch works in."""
    driver = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


def _check(driver: Any, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"torch's stream cannot wait for a result: CUDA error {code}: {(text.value or b'').decode()}")
