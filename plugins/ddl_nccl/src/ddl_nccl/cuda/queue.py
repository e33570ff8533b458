"""Implements the device contract's queue by a CUDA stream. The queue's buckets use the stream as their ``Ground``."""

from __future__ import annotations

import ctypes
import struct
import time
from abc import abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ddl_nccl.cuda.buckets import Addresses, BucketCopy, CudaKernels, Ground, KernelLaunch
from ddl_nccl.cuda.driver import Driver, Facts
from ddl_nccl.cuda.names import Name
from ddlcore.contracts.device import DeviceRuntime, Event, Queue
from ddlcore.contracts.transport import Memory
from ddlcore.errors import DeviceError
from ddlcore.types import DType

THREADS = 256  # number of threads of a block
PLACES = 64  # pinned copies of an address table that may be on their way to the device at once; made when needed
SPIN_S = 20e-6  # how long a waiting thread keeps its core busy
LEAST_SLEEP_S, MOST_SLEEP_S = 50e-6, 1e-3  # how long it sleeps after that, longer each time
TABLE_S = 60.0  # how long to wait for the oldest of these copies, if the host is PLACES buckets ahead
CLOSED = "CUDA: the stream is closed"


class StreamDevice(DeviceRuntime):
    """A device with the methods that its streams and events need."""

    driver: Driver
    facts: Facts

    @abstractmethod
    def record(self, stream: int) -> CudaEvent:
        """Return an unused event that has just been recorded on the stream."""

    @abstractmethod
    def give_event(self, handle: int) -> None:
        """Put an unused event back into the pool, to record it again later.

        Streams that already wait for the event still wait for it.
        """

    @abstractmethod
    def close_stream(self, stream: int, timeout_s: float) -> None:
        """Wait until all work queued on the stream has run, and destroy the stream.

        If the work has not run after ``timeout_s`` seconds, leave the stream open.
        """

    @abstractmethod
    def kernel(self, name: Name) -> Any:
        """Return the kernel ``name``. If it is not in the cache, compile it first. Raises DeviceError if this fails."""

    @abstractmethod
    def has_kernel(self, name: Name) -> bool:
        """Return whether the kernel ``name`` is available.

        If it is not available, log the reason, but only the first time on this device.
        """


class CudaEvent(Event):
    """An event of the device's pool. It goes back to the pool when its last reference is deleted."""

    __slots__ = ("_device", "_done", "handle")

    def __init__(self, device: StreamDevice, handle: int) -> None:
        self._device = device
        self.handle = handle
        self._done = False

    def done(self) -> bool:
        if not self._done:
            self._done = self._device.driver.done(self.handle)
        return self._done

    def wait(self, timeout_s: float) -> bool:
        start = time.monotonic()
        sleep_s = LEAST_SLEEP_S
        while not self.done():
            waited = time.monotonic() - start
            if waited >= timeout_s:
                return False
            if waited > SPIN_S:
                time.sleep(min(sleep_s, timeout_s - waited))
                sleep_s = min(2 * sleep_s, MOST_SLEEP_S)
        return True

    def __del__(self) -> None:
        self._device.give_event(self.handle)


class CudaQueue(Queue):
    """A queue that is one stream of a device. Every call is queued on the device, and only ``close`` blocks."""

    runtime: StreamDevice

    def __init__(self, runtime: StreamDevice, stream: int) -> None:
        self.runtime = runtime
        self.handle = stream
        self._ground = _Stream(runtime, stream)
        self.kernels = CudaKernels(self._ground)

    def record(self) -> CudaEvent:
        self._open()
        return self.runtime.record(self.handle)

    def wait_for(self, event: int) -> None:
        self._open()
        self.runtime.driver.wait_for(self.handle, event)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self._open()
        if nbytes:
            self.runtime.driver.copy(target, source, nbytes, self.handle)

    def packer(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[Sequence[int], int], None]:
        return BucketCopy(self._ground, counts, dtype, wire, scale, False).run

    def unpacker(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[int, Sequence[int]], None]:
        run = BucketCopy(self._ground, counts, dtype, wire, scale, True).run

        def unpack(source: int, targets: Sequence[int]) -> None:
            run(targets, source)

        return unpack

    def close(self, timeout_s: float) -> None:
        stream, self.handle = self.handle, 0
        if stream:
            self._ground.closed = True
            self.runtime.close_stream(stream, timeout_s)

    def _open(self) -> None:
        if not self.handle:
            raise DeviceError(CLOSED)


class _Stream(Ground):
    """The memory and the kernel launches of one stream."""

    def __init__(self, device: StreamDevice, stream: int) -> None:
        self.device = device
        self.closed = False
        self._stream = stream
        self.multiprocessors = device.facts.multiprocessors

    @property
    def stream(self) -> int:
        if self.closed:
            raise DeviceError(CLOSED)
        return self._stream

    def constant(self, words: array[int]) -> Memory:
        memory = self.device.allocate(8 * len(words))
        pinned = self.device.pinned(8 * len(words))  # reused only after the copy has run
        ctypes.memmove(pinned.address, words.buffer_info()[0], 8 * len(words))
        self.device.driver.copy(memory.address, pinned.address, 8 * len(words), self.stream)
        return memory

    def addresses(self, n: int) -> Addresses:
        return _Table(self, n)

    def prepare(self, name: Name, blocks: int, arguments: Sequence[int | float]) -> KernelLaunch:
        return _Kernel(self, self.device.kernel(name), name, blocks, arguments)

    def can_run(self, name: Name) -> bool:
        return self.device.has_kernel(name)

    def copier(self, sizes: Sequence[int]) -> Callable[[Sequence[int], Sequence[int]], None]:
        def copy(sources: Sequence[int], targets: Sequence[int]) -> None:
            self.device.driver.copy_many(targets, sources, sizes, self.stream)

        return copy


class _Table(Addresses):
    """A table of addresses in device memory.

    When the addresses change, they are copied to the device from pinned memory.
    """

    def __init__(self, ground: _Stream, n: int) -> None:
        self._ground = ground
        self._memory = ground.device.allocate(8 * n)
        self.address = self._memory.address
        self._pack = struct.Struct(f"={n}Q").pack_into
        self._nbytes = 8 * n
        self._last: list[int] | None = None
        self._places: deque[tuple[Memory, Any, CudaEvent]] = deque()  # pinned memory, view, copy's event; oldest first

    def fill(self, addresses: Sequence[int]) -> None:
        if addresses == self._last:
            return
        device, stream = self._ground.device, self._ground.stream
        place, view = self._place()
        self._pack(view, 0, *addresses)
        with device.driver.current():
            device.driver.copy(self.address, place.address, self._nbytes, stream)
            self._places.append((place, view, device.record(stream)))
        self._last = list(addresses)

    def _place(self) -> tuple[Memory, Any]:
        """Return pinned memory for a table, and a view of it. No queued copy still reads this memory."""
        # The host must not overwrite pinned memory before the device has read it: the copy runs later, when the stream
        # gets there, and would send the addresses of a later bucket. So each change takes other pinned memory, until
        # the event behind a copy is done. A limit on their number keeps a host that is far ahead from pinning more and
        # more memory.
        if self._places and (len(self._places) >= PLACES or self._places[0][2].done()):
            place, view, sent = self._places[0]
            if not sent.wait(TABLE_S):
                raise DeviceError(f"CUDA: {PLACES} buckets have been waiting on the device for {TABLE_S:.0f} s")
            self._places.popleft()
            return place, view
        place = self._ground.device.pinned(self._nbytes)
        return place, (ctypes.c_char * max(1, self._nbytes)).from_address(place.address)


class _Kernel(KernelLaunch):
    """A launch that keeps the arguments in the form that the driver needs: words, and pointers to the words."""

    def __init__(
        self, ground: _Stream, function: Any, name: Name, blocks: int, arguments: Sequence[int | float]
    ) -> None:
        self._ground, self._function, self._blocks = ground, function, blocks
        self._words = (ctypes.c_int64 * len(arguments))()
        start = ctypes.addressof(self._words)
        for i, (kind, value) in enumerate(zip(name.arguments, arguments)):
            if kind == "d":
                struct.pack_into("=d", self._words, 8 * i, value)
            else:
                self._words[i] = int(value)
        self._pointers = (ctypes.c_void_p * len(arguments))(*range(start, start + 8 * len(arguments), 8))
        self._parameters = ctypes.addressof(self._pointers)
        self._launch = ground.device.driver.launch

    def set(self, index: int, value: float) -> None:
        self._words[index] = int(value)

    def run(self) -> None:
        self._launch(self._function, self._blocks, THREADS, self._ground.stream, self._parameters)
