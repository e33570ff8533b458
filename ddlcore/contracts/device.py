"""The device contract: the memory, the ordered queues and the events of one kind of accelerator, and its kernels.

A queue is what other libraries call a stream. Work on one queue runs in order, some time after the call that enqueued
it. Queues wait for each other through events. Nothing here waits for the device unless its docstring says so.

* Addresses are numbers: of device memory, of pinned host memory, or of any host memory if a call says so.
* The caller that enqueues a call keeps the memory it uses alive until an event recorded after the call is done.
  Sequences of addresses and counts are read before the call returns.
* Any thread may call. Calls on one queue come from one thread at a time. When a call returns, the thread's own current
  device and stream, which belong to the user's framework, are the same as before.
* One function maps foreign errors to DeviceError, with the foreign error as the cause.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.memory import Memory
from ddlcore.types import Device, DType

__all__ = ["DeviceRuntime", "Event", "Queue"]


class Event(ABC):
    """A point in a queue. The event is done when everything that was enqueued before it has run."""

    handle: int = 0  # the device library's handle, such as a cudaEvent_t; any framework can wait for it

    @abstractmethod
    def done(self) -> bool:
        """Return at once whether the event is done. Raises DeviceError if the device failed before it."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block this thread, without the GIL, until the event is done; return False if ``timeout_s`` passed first.

        Raises the same errors as ``done``.
        """


class Queue(ABC):
    """One ordered queue (stream) of one device."""

    handle: int = 0  # the device library's handle, such as a cudaStream_t
    runtime: DeviceRuntime  # the runtime that created this queue
    kernels: Kernels  # kernels that enqueue on this queue and return at once; they take device addresses

    @abstractmethod
    def record(self) -> Event:
        """Return an event that is done when everything enqueued so far has run."""

    @abstractmethod
    def wait_for(self, event: int) -> None:
        """Make everything that is enqueued from now on wait for the event with the handle ``event``.

        The event may come from any library. It may be recorded again, or destroyed, after this method has returned.
        """

    @abstractmethod
    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes; each side is device memory or pinned host memory, and the two do not overlap."""

    @abstractmethod
    def packer(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[Sequence[int], int], None]:
        """Prepare ``pack`` for a bucket that recurs, and return a function to call with (sources, target)."""

    @abstractmethod
    def unpacker(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[int, Sequence[int]], None]:
        """Prepare ``unpack`` for a bucket that recurs, and return a function to call with (source, targets)."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the enqueued work, and release the queue.

        Calling it again has no effect. It raises no errors of the device's work.
        """


class DeviceRuntime(ABC):
    """One device as this process sees it. It is constructed without arguments; ``open`` is called first."""

    device: Device
    identity: str = (
        ""  # of the physical device or part of one, such as a MIG instance; the same for all processes on its host
    )

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many devices of this kind the process sees; 0 if there are none, or no driver. It never raises."""

    @abstractmethod
    def open(self, device: Device) -> None:
        """Open ``device``. Raises DeviceError, with advice, if there is no such device, no driver, or no memory."""

    @abstractmethod
    def queue(self) -> Queue:
        """Return a new queue, which waits for no other queue."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Return device memory aligned to 512 bytes.

        It is freed when its last reference is gone and the device has finished with it.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> Memory:
        """Return pinned host memory, from and to which queues copy directly.

        It is freed in the same way as device memory.
        """

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager within which this device is the calling thread's current one.

        It restores the former current device at its end. It is for libraries that use the current device of the calling
        thread.
        """
        return nullcontext()

    def close(self) -> None:
        """Release the runtime; calling it again has no effect.

        All its queues have been closed before. Only memory that a tensor still holds may be used afterwards.
        """
