"""A CUDA device that implements the device contract: memory, streams, events and kernels.

This module calls CUDA's driver through driver.py.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from typing import Any, Final

from ddl_nccl.cuda.code import obtain
from ddl_nccl.cuda.driver import Driver, Facts
from ddl_nccl.cuda.freeing import Freeing
from ddl_nccl.cuda.names import COPY, Name
from ddl_nccl.cuda.queue import CudaEvent, CudaQueue, StreamDevice
from ddlcore.contracts.transport import Memory
from ddlcore.errors import DeviceError
from ddlcore.types import Device

ALIGNMENT: Final = 512
MOST_TIMES: Final = 2  # pinned memory is reused if it is at most this many times the requested size
CLOSE_S = 1.0  # how long ``close`` waits for memory that was given back just before
SHORT_S = 10.0  # how long a failed allocation waits for memory that was given back
log = logging.getLogger("ddl")


class CudaDevice(StreamDevice):
    """A CUDA device.

    ``driver`` gives access to CUDA's driver, and ``obtain`` returns compiled kernels; tests replace both.
    """

    def __init__(self, driver: Driver | None = None, obtain: Any = obtain) -> None:
        self.driver = driver or Driver()
        self.facts: Facts
        self._obtain = obtain
        self._lock = threading.RLock()  # reentrant: a finalizer may run while its own thread holds the lock
        self._streams: list[int] = []  # open streams of queues
        self._events: deque[int] = deque()  # pool of unused events
        self._retired: deque[tuple[int, int, CudaEvent]] = deque()  # pinned, to reuse: (address, nbytes, last use)
        self._kernels: dict[Name, Any] = {}
        self._missing: dict[Name, DeviceError] = {}
        self._said = False
        self._closed = True

    @classmethod
    def count(cls) -> int:
        try:
            return Driver().count()
        except DeviceError:
            return 0

    def open(self, device: Device) -> None:
        if device.kind != "cuda":
            raise DeviceError(f"CUDA: {device} is no CUDA device")
        self.facts = self.driver.open(device.index)
        self.device = device
        self.identity = self.facts.identity
        # Memory is allocated and freed on the first stream, which never waits. The second stream waits for all queues,
        # so its events tell when pinned memory is out of use.
        self._getting, self._retiring = self.driver.create_stream(), self.driver.create_stream()
        self._freeing = Freeing(device, self._record_all, lambda address: self.driver.free(address, self._getting))
        self._closed = False
        self.has_kernel(COPY)  # compile here, where a user expects to wait, and not when the first bucket is ready

    def queue(self) -> CudaQueue:
        stream = self.driver.create_stream()
        with self._lock:
            here = self.record(self._getting)  # the reference keeps the pool from recording the event again
            self.driver.wait_for(stream, here.handle)  # for the memory that the queue will be given
            self._streams.append(stream)
        return CudaQueue(self, stream)

    def current(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.driver.current()
        return context

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = (self._getting, self._retiring)
        self._freeing.close(CLOSE_S)
        until_s = time.monotonic() + CLOSE_S
        while self._retired:
            address, _, event = self._retired.popleft()
            # Memory that is still in use is freed with the process: unpinning it would wait for the device.
            if event.wait(max(0.0, until_s - time.monotonic())):
                self.driver.unpin(address)
        for stream in streams:
            self.driver.destroy_stream(stream)
        while self._events:
            self.driver.destroy_event(self._events.pop())

    # --- memory

    def allocate(self, nbytes: int) -> Memory:
        whole = max(nbytes, 1) + ALIGNMENT
        try:
            return _Block(self._allocate(whole), nbytes, self._free)
        except DeviceError:  # freed memory returns only when the device has finished everything queued before
            if not self._freeing.settle(SHORT_S):
                raise
        return _Block(self._allocate(whole), nbytes, self._free)

    def _allocate(self, whole: int) -> int:
        with self._lock, self.driver.current():
            address = self.driver.allocate(whole, self._getting)
            if self._streams:
                here = self.record(self._getting)
                for stream in self._streams:
                    self.driver.wait_for(stream, here.handle)
        return address

    def pinned(self, nbytes: int) -> Memory:
        least = max(nbytes, 1) + ALIGNMENT
        address, whole = self._again(least)
        return _Block(address or self.driver.pin(whole), nbytes, partial(self._retire, whole))

    def _free(self, address: int, nbytes: int) -> None:
        if self._closed:  # the host may wait here, unless a stream of ours holds work that may never end
            if not self._streams:
                self.driver.synchronise()
                self.driver.free(address, 0)
            return
        self._freeing.let_go(address)

    def _retire(self, whole: int, address: int, nbytes: int) -> None:
        if self._closed:
            if not self._streams:
                self.driver.unpin(address)
            return
        with self._lock, self.driver.current():
            self._after_all()
            self._retired.append((address, whole, self.record(self._retiring)))

    def _after_all(self) -> None:
        """Make the retiring stream wait for all work that has been queued on the queues' streams so far.

        The retiring stream is used only to record when pinned memory is out of use.
        """
        for stream in self._streams:
            here = self.record(stream)  # keeps the event, as in queue()
            self.driver.wait_for(self._retiring, here.handle)

    def _again(self, least: int) -> tuple[int, int]:
        """Return the address and size of pinned memory that the device no longer uses, or (0, ``least``) if none fits.

        Pinned memory is reused because pinning takes long, and unpinning may wait for the device. The returned memory
        may be larger than ``least`` bytes. If the size had to be equal, pinned memory would grow without end when each
        request has a new size, as with allgather.
        """
        with self._lock:
            # A copy of the deque, because a finalizer may append to it in this very thread during the loop.
            fitting = [one for one in list(self._retired) if least <= one[1] <= MOST_TIMES * least and one[2].done()]
            if not fitting:
                return 0, least
            found = min(fitting, key=itemgetter(1))
            self._retired.remove(found)
            return found[0], found[1]

    # --- events and streams, for queues

    def record(self, stream: int) -> CudaEvent:
        event = self._event()
        self.driver.record(event.handle, stream)
        return event

    def _record_all(self) -> CudaEvent:
        """Return an event that is done when all work queued so far in the process has run.

        May block until that work has run.
        """
        event = self._event()
        self.driver.record_all(event.handle, self._getting)
        return event

    def _event(self) -> CudaEvent:
        try:
            handle = self._events.pop()
        except IndexError:
            handle = self.driver.create_event()
        return CudaEvent(self, handle)

    def give_event(self, handle: int) -> None:
        if not self._closed:
            self._events.append(handle)

    def close_stream(self, stream: int, timeout_s: float) -> None:
        try:
            if self.record(stream).wait(timeout_s):
                with self._lock:
                    self._streams.remove(stream)
                self.driver.destroy_stream(stream)
                return
        except DeviceError as error:
            log.debug("closing a stream of %s: %s", self.device, error)
            return
        # The stream stays in the list, so memory is freed only after it, as before.
        log.warning("%s has not finished what was queued within %.0f s; going on without it", self.device, timeout_s)

    # --- kernels

    def kernel(self, name: Name) -> Any:
        function = self._kernels.get(name)
        if function is not None:
            return function
        with self._lock:
            if name in self._missing:
                raise self._missing[name]
        try:
            image = self._obtain(name, self.facts.capability)
            function = self.driver.load(image, str(name))
        except DeviceError as error:
            self._missing[name] = error
            raise
        except RuntimeError as error:  # NoCompiler, KernelError
            self._missing[name] = DeviceError(f"CUDA: no kernel {name} for {self.device}: {error}")
            raise self._missing[name] from error
        self._kernels[name] = function
        return function

    def has_kernel(self, name: Name) -> bool:
        try:
            self.kernel(name)
        except DeviceError as error:
            if not self._said:
                self._said = True
                log.warning("tensors of %s are packed by the driver's copies, one a tensor: %s", self.device, error)
            return False
        return True


class _Block(Memory):
    """Memory that is given back to its device when the last reference to this object is deleted."""

    def __init__(self, raw: int, nbytes: int, let_go: Any) -> None:
        self.address = (raw + ALIGNMENT - 1) & -ALIGNMENT
        self.nbytes = nbytes
        finalizer = weakref.finalize(self, _let_go, let_go, raw, nbytes)
        finalizer.atexit = False  # the memory ends with the process


def _let_go(let_go: Any, raw: int, nbytes: int) -> None:
    try:
        let_go(raw, nbytes)
    except DeviceError as error:  # the device has failed, which its users were told
        log.debug("letting go of memory: %s", error)
