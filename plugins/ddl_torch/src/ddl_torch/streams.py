"""Orders ddl's work and torch's work on CUDA streams. No other file of this package uses streams.

This module records when a tensor is ready, and makes torch's streams wait for events of ddl's own device stream. torch
can wait only for events that torch has created, so this module calls the CUDA driver for this wait.
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

from ddlcore.contracts import PersistentRequest
from ddlcore.errors import DeviceError, InvalidArgument
from ddlcore.types import CPU, Buffer, Device

KIND = "cuda"
DRIVER = "libcuda.so.1"
CAPTURING = (
    "a collective cannot be captured in a CUDA graph: other ranks take part in it, each time, by calls of their hosts; "
    "capture what lies between collectives (torch.cuda.make_graphed_callables), not the backward pass of a "
    "DistributedOptimizer's parameters, nor a wait for its gradients"
)


class Mark(Protocol):
    """A reusable device event that records when a tensor is ready. ``set`` may be called any number of times."""

    def set(self, what: Buffer | PersistentRequest) -> None:
        """Record on the calling thread's current stream when the tensor that ``what`` describes is ready.

        The tensor is ready when the device has done all work that the thread has queued on this stream so far.
        """


class Streams(Protocol):
    """The stream functions that an adapter needs for one kind of device. Any thread may call them."""

    def place(self, tensor: torch.Tensor) -> Device | None:
        """Return where the tensor is: CPU, or a device of this kind. Returns None for any other device."""

    def mark(self, device: Device) -> Mark:
        """Return a new object that can record, on a stream of ``device``, when a tensor is ready."""

    def hold(self, device: Device, owner: object) -> tuple[object, Mark]:
        """Return two things for a tensor on ``device``: an object that keeps ``owner`` alive, and a Mark from a pool.

        When the returned object is freed, the Mark goes back to the pool.
        """

    def after(self, event: int, tensors: Sequence[torch.Tensor]) -> None:
        """Make the calling thread's current streams wait for the device event with the handle ``event``.

        The host does not wait. ``tensors`` are the tensors that are used after the event; the streams of their devices
        wait. If ``tensors`` is empty, the streams of all devices on which tensors have been seen wait.
        """


class CudaStreams(Streams):
    """The streams of NVIDIA GPUs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = itertools.count(1)
        self._free: dict[Device, list[_CudaMark]] = {}
        self._places: dict[int, Device] = {}  # by index: all GPUs on which tensors have been seen

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

    def hold(self, device: Device, owner: object) -> tuple[object, _CudaMark]:
        free = self._free.setdefault(device, [])
        try:
            mark = free.pop()
        except IndexError:
            mark = self.mark(device)
        return _Held(owner, mark, free), mark

    def after(self, event: int, tensors: Sequence[torch.Tensor]) -> None:
        _refuse_capture()
        indexes: Iterable[int] = {tensor.get_device() for tensor in tensors} or tuple(self._places)
        for index in indexes:
            stream = torch.cuda.current_stream(index)
            _wait(index, stream.cuda_stream, event)
            for tensor in tensors:
                if tensor.get_device() == index:
                    with suppress(RuntimeError):  # torch's other allocators refuse memory that is not theirs
                        tensor.record_stream(stream)  # no effect if it was allocated on this stream


class _CudaMark(Mark):
    """A Mark that consists of a torch event. torch creates the CUDA event when the Mark is first recorded."""

    __slots__ = ("_event", "_index", "_lock", "_orders")

    def __init__(self, index: int, lock: threading.Lock, orders: Any) -> None:
        self._event = torch.cuda.Event()
        self._index = index
        self._lock = lock
        self._orders = orders

    def set(self, what: Buffer | PersistentRequest) -> None:
        if torch.cuda.is_current_stream_capturing():  # as ``_refuse_capture``, without its call: this runs per gradient
            raise InvalidArgument(CAPTURING)
        stream = torch.cuda.current_stream(self._index)
        # ``order`` must agree with the stream: of two events on one stream, the later one has the greater number. Code
        # that must wait for several events of a stream waits only for the one with the greatest number. Without the
        # lock, two threads that share a stream could record in one order and take their numbers in the other order.
        with self._lock:
            self._event.record(stream)
            order = next(self._orders)
        what.mark_ready(self._event.cuda_event, stream.cuda_stream, order)


class _Held:
    """An object that keeps a tensor and its Mark together. When this object is freed, the Mark returns to the pool."""

    __slots__ = ("_free", "_mark", "tensor")

    def __init__(self, tensor: object, mark: _CudaMark, free: list[_CudaMark]) -> None:
        self.tensor = tensor
        self._mark = mark
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._mark)


def _refuse_capture() -> None:
    """Raise InvalidArgument if a CUDA graph is being captured.

    An event recorded in a capture is no real event of the device, and a stream that waits for such an event becomes a
    part of the capture.
    """
    if torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(CAPTURING)


# --- the driver


def _wait(index: int, stream: int, event: int) -> None:
    """Make all work that is queued later on the CUDA stream ``stream`` of the GPU ``index`` wait for ``event``.

    ``stream`` and ``event`` are CUDA handles.
    """
    driver = _driver()
    # Handle 0 means the default stream of the current context, and a thread that is new to CUDA has no context yet.
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
    """Return the CUDA context that torch uses on the GPU with number ``index``: the primary context of that GPU."""
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
