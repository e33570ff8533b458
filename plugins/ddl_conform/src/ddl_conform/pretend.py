"""A simulated device for tests, called the pretend device, which needs no hardware and no driver.

The memory of a pretend device is host memory. A queue of the device is a thread that executes the queued calls in
order, and delays some of them at random. So code that forgets to wait for an event gets wrong values. If a queued call
uses memory that was freed, the call fails. The device fulfils ``ddlcore.contracts.device``, and no more than this
contract. Where the contract allows several behaviours, the device behaves in the way in which mistakes of the code
under test show most probably. ``PretendTensor`` is a tensor in the memory of such a device.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Final

from ddlcore.contracts.device import DeviceRuntime, Event, Queue
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory
from ddlcore.errors import DeviceError
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.types import Device, DType, ReduceOp

__all__ = ["KIND", "PretendEvent", "PretendMemory", "PretendQueue", "PretendRuntime"]

KIND = "pretend"
GARBAGE = 0xA5  # the content of memory before the first write
CLOSE_SLICE_S = 0.05
_handles = itertools.count(1)
_events: weakref.WeakValueDictionary[int, PretendEvent] = weakref.WeakValueDictionary()


class PretendEvent(Event):
    """An event of one queue. As long as a reference to the event exists, every queue can find it by its handle."""

    def __init__(self) -> None:
        self.handle = next(_handles)
        self.failure: BaseException | None = None
        self._come = threading.Event()
        _events[self.handle] = self

    def come(self, failure: BaseException | None) -> None:
        """Record that the queue has reached the event.

        ``failure`` is the error of a call that was queued before the event and failed; None if all calls succeeded.
        """
        self.failure = failure
        self._come.set()

    def done(self) -> bool:
        if not self._come.is_set():
            return False
        if self.failure is not None:
            raise DeviceError(f"pretend: a call that was queued before failed: {self.failure}") from self.failure
        return True

    def wait(self, timeout_s: float) -> bool:
        return self._come.wait(timeout_s) and self.done()


class PretendQueue(Queue):
    """A queue of a pretend device: a thread that executes calls in order.

    The queue delays some calls by up to ``dawdle_s`` seconds. Random numbers from ``seed`` decide which calls.
    """

    runtime: PretendRuntime

    def __init__(self, runtime: PretendRuntime, seed: int, dawdle_s: float) -> None:
        self.runtime = runtime
        self.handle = next(_handles)
        self.kernels = _QueuedKernels(self)
        self._rng = random.Random(seed)
        self._dawdle_s = dawdle_s
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._closed = False
        self._given_up = False
        self._over = False  # the thread takes no more calls
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=f"ddl-pretend-{self.handle}", daemon=True)
        self._thread.start()

    def call(self, run: Callable[[], None]) -> None:
        """Add a call of ``run`` to the queue. The queue's thread makes this call later.

        If a queued call raises an error, the calls after it do not run. Raises DeviceError if the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise DeviceError("pretend: the queue is closed")
            self._calls.append(run)
            self._changed.notify()

    def record(self) -> PretendEvent:
        event = PretendEvent()
        with self._changed:
            if self._over:
                event.come(DeviceError("pretend: the queue is closed"))
            else:
                self._calls.append(partial(self._reach, event))
                self._changed.notify()
        return event

    def wait_for(self, event: int) -> None:
        found = _events.get(event)
        if found is None:
            raise DeviceError(f"pretend: no event has the handle {event}; whoever recorded it has let it go")
        self.call(partial(self._await, found))

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self.call(partial(self._copy, source, target, nbytes))

    def packer(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[Sequence[int], int], None]:
        lengths = list(counts)

        def pack(sources: Sequence[int], target: int) -> None:
            self.kernels.pack(sources, lengths, dtype, target, wire, scale)

        return pack

    def unpacker(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[int, Sequence[int]], None]:
        lengths = list(counts)

        def unpack(source: int, targets: Sequence[int]) -> None:
            self.kernels.unpack(source, wire, targets, lengths, dtype, scale)

        return unpack

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._given_up = True
        self._thread.join(timeout_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a context manager. Inside it, the queue accepts calls but does not begin to execute any of them."""
        with self._changed:
            self._held += 1
        try:
            yield
        finally:
            with self._changed:
                self._held -= 1
                self._changed.notify()

    @property
    def idle(self) -> bool:
        """Return whether all calls that were queued so far have run."""
        return self.record().wait(0.0)

    # --- the queue's own thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._given_up and (self._held or not self._calls):
                    if self._closed and not self._calls:
                        self._over = True
                        return
                    self._changed.wait(CLOSE_SLICE_S if self._closed else None)
                # A queue that is given up must still complete the events in it, because other threads and other queues
                # may wait for these events. All other calls are dropped, because the timeout of close() is over.
                if self._given_up:
                    self._over = True
                    left, self._calls = self._calls, deque()
                    self._failure = self._failure or DeviceError("pretend: the queue was closed")
                    for call in left:
                        if isinstance(call, partial) and call.func == self._reach:
                            call()
                    return
                run = self._calls.popleft()
            if self._rng.random() < 0.3:
                time.sleep(self._rng.random() * self._dawdle_s)
            try:
                if self._failure is None or (isinstance(run, partial) and run.func == self._reach):
                    run()
            except BaseException as error:
                self._failure = error

    def _reach(self, event: PretendEvent) -> None:
        event.come(self._failure)

    def _await(self, event: PretendEvent) -> None:
        while not event.wait(CLOSE_SLICE_S):
            if self._given_up:
                raise DeviceError("pretend: the queue was closed while it waited for an event")

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        self.runtime.require(source, nbytes)
        self.runtime.require(target, nbytes)
        ctypes.memmove(target, source, nbytes)


class _Graveyard:
    """The record of the memory that was freed on all pretend devices of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone: list[tuple[int, int]] = []  # (address, end) of freed memory, sorted
        self._going: deque[tuple[int, int]] = deque()  # freed memory that ``require`` has yet to sort into ``_gone``
        self._kept: list[object] = []  # the freed blocks themselves, so that the memory is not reused

    def bury(self, address: int, nbytes: int, block: object) -> None:
        """Record that the ``nbytes`` bytes at ``address`` were freed, and prevent that this memory is used again.

        ``block`` is the object that owns the bytes; it is kept forever. A finalizer calls this method, possibly while
        the same thread holds the lock in ``require``. So this method must not take the lock.
        """
        self._kept.append(block)
        self._going.append((address, address + nbytes))

    def require(self, address: int, nbytes: int) -> None:
        """Raise DeviceError if one of the ``nbytes`` bytes at ``address`` was freed.

        A queue checks the memory of each call in this way just before the call runs. The thread that queues a call must
        keep the memory alive until the call has run.
        """
        with self._lock:
            while self._going:
                insort(self._gone, self._going.popleft())
            at = bisect_right(self._gone, (address + nbytes - 1, 1 << 64)) - 1
            if nbytes and at >= 0 and self._gone[at][1] > address:
                raise DeviceError("pretend: a queued call uses memory that nobody has kept for it")


_graveyard: Final = _Graveyard()  # one for the process, because addresses belong to the process


class PretendMemory(Memory):
    """Memory of a pretend device. New memory is filled with garbage.

    After the memory was freed, it is never given out again, so that a later use of its addresses can be detected.
    """

    def __init__(self, nbytes: int) -> None:
        block = (ctypes.c_char * (nbytes + 512))()
        self.address = (ctypes.addressof(block) + 511) & ~511
        self.nbytes = nbytes
        ctypes.memset(self.address, GARBAGE, nbytes)
        finalizer = weakref.finalize(self, _graveyard.bury, self.address, nbytes, block)
        finalizer.atexit = False


class PretendRuntime(DeviceRuntime):
    """The runtime of one pretend device. There are ``devices`` such devices, and they have the indexes 0, 1 and so on.

    The queues delay some calls by up to ``dawdle_s`` seconds. ``seed`` decides which calls are delayed.
    """

    seed: ClassVar[int] = 0
    dawdle_s: ClassVar[float] = 0.002
    devices: ClassVar[int] = 8

    def __init__(self) -> None:
        self._queues = 0

    @classmethod
    def count(cls) -> int:
        return cls.devices

    def open(self, device: Device) -> None:
        if device.kind != KIND or device.index >= self.count():
            raise DeviceError(f"there is no device {device}; there are {self.count()} pretend ones, from {KIND}:0 on")
        self.device = device
        self.identity = str(device)
        self.host_kernels = CpuKernels(late=True)

    def queue(self) -> PretendQueue:
        self._queues += 1
        return PretendQueue(self, hash((self.seed, self.device.index, self._queues)), self.dawdle_s)

    def allocate(self, nbytes: int) -> PretendMemory:
        return PretendMemory(nbytes)

    def pinned(self, nbytes: int) -> PretendMemory:
        return PretendMemory(nbytes)

    def require(self, address: int, nbytes: int) -> None:
        """Raise DeviceError if one of the ``nbytes`` bytes at ``address`` was freed.

        A queue checks the memory of each call in this way just before the call runs. The thread that queues a call must
        keep the memory alive until the call has run.
        """
        _graveyard.require(address, nbytes)


class _QueuedKernels(Kernels):
    """The kernels of a queue.

    Each call of a kernel is added to the queue. The queue's thread executes it later with the kernels for host memory.
    """

    def __init__(self, queue: PretendQueue) -> None:
        self._queue = queue

    def _call(self, name: str, used: Sequence[tuple[int, int]], *args: object) -> None:
        def run() -> None:
            for address, nbytes in used:
                self._queue.runtime.require(address, nbytes)
            getattr(self._queue.runtime.host_kernels, name)(*args)

        self._queue.call(run)

    def pack(
        self, sources: Sequence[int], counts: Sequence[int], dtype: DType, target: int, wire: DType, scale: float = 1.0
    ) -> None:
        used = [(address, count * dtype.itemsize) for address, count in zip(sources, counts)]
        used.append((target, sum(counts) * wire.itemsize))
        self._call("pack", used, list(sources), list(counts), dtype, target, wire, scale)

    def unpack(
        self, source: int, wire: DType, targets: Sequence[int], counts: Sequence[int], dtype: DType, scale: float = 1.0
    ) -> None:
        used = [(address, count * dtype.itemsize) for address, count in zip(targets, counts)]
        used.append((source, sum(counts) * wire.itemsize))
        self._call("unpack", used, source, wire, list(targets), list(counts), dtype, scale)

    def reduce(
        self,
        sources: Sequence[int],
        target: int,
        count: int,
        dtype: DType,
        op: ReduceOp,
        scale: float = 1.0,
        prescale: float = 1.0,
    ) -> None:
        used = [(address, count * dtype.itemsize) for address in (*sources, target)]
        self._call("reduce", used, list(sources), target, count, dtype, op, scale, prescale)

    def fill_identity(self, target: int, count: int, dtype: DType, op: ReduceOp) -> None:
        self._call("fill_identity", [(target, count * dtype.itemsize)], target, count, dtype, op)
