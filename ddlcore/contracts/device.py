"""The device contract: the memory, the queues and the events of one kind of accelerator, and its kernels.

A queue is what other libraries call a stream. The work on one queue runs in order, some time after the calls that
enqueued it. Queues wait for each other by means of events. No call waits for the device, unless its docstring says so.

* Addresses are numbers. They are in device memory or in pinned host memory, or in any host memory if a call says so.
* The caller that enqueues a call keeps the memory that the call uses alive, until an event that was recorded after the
  call is done. Sequences of addresses and counts are read before the call returns.
* Any thread may call. Calls on one queue come from one thread at a time. A call does not change the thread's current
  device and stream, because these belong to the user's framework.
* One function maps the errors of the device's library to DeviceError, with the library's error as the cause.
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
    """A point in a queue. The event is done when all work that was enqueued before it has run."""

    handle: int = 0  # the device library's handle, such as a cudaEvent_t; any framework can wait for it

    @abstractmethod
    def done(self) -> bool:
        """Return at once whether the event is done. Raises DeviceError if the device has failed before this point."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the event is done, without the GIL, and return True.

        Return False if ``timeout_s`` has passed first. Raises the same errors as ``done``.
        """


class Queue(ABC):
    """One ordered queue (stream) of work on one device."""

    handle: int = 0  # the device library's handle, such as a cudaStream_t
    runtime: DeviceRuntime  # the runtime that created this queue
    kernels: Kernels  # each call enqueues work on this queue and returns at once; addresses are of device memory

    @abstractmethod
    def record(self) -> Event:
        """Return an event that is done when all work that is in the queue now has run."""

    @abstractmethod
    def wait_for(self, event: int) -> None:
        """Make all work that is enqueued from now on wait for the event with the handle ``event``.

        The event may be of any library. It may be recorded again, or destroyed, after this method has returned.
        """

    @abstractmethod
    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes from ``source`` to ``target``, which do not overlap.

        Each of them is in device memory or in pinned host memory.
        """

    @abstractmethod
    def packer(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[Sequence[int], int], None]:
        """Return a function that does ``Kernels.pack`` for a bucket that is run repeatedly.

        The function is called with (sources, target). All other arguments are fixed here.
        """

    @abstractmethod
    def unpacker(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[int, Sequence[int]], None]:
        """Return a function that does ``Kernels.unpack`` for a bucket that is run repeatedly.

        The function is called with (source, targets). All other arguments are fixed here.
        """

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the enqueued work, and release the queue.

        A second call has no effect. If the work has failed on the device, this raises no error.
        """


class DeviceRuntime(ABC):
    """The access to one device, as this process sees it. It is built without arguments; ``open`` is called first."""

    device: Device
    identity: str = ""  # name of the physical device, or of a MIG instance; equal for all processes on the host

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many devices of this kind the process sees. It never raises.

        The result is 0 if there are none, or if there is no driver.
        """

    @abstractmethod
    def open(self, device: Device) -> None:
        """Open ``device``. Raises DeviceError, with advice, if there is no such device, no driver, or no memory."""

    @abstractmethod
    def queue(self) -> Queue:
        """Return a new queue, whose work does not wait for the work of other queues."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Return device memory whose address is a multiple of 512.

        It is freed when there is no reference to it any more and the device has finished with it.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> Memory:
        """Return pinned host memory, which queues can copy directly. It is freed in the same way as device memory."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager that makes this device the calling thread's current device.

        At its end, it restores the former current device. It is for libraries that use the current device of the
        calling thread.
        """
        return nullcontext()

    def close(self) -> None:
        """Release the runtime. A second call has no effect.

        All its queues have been closed before. Afterwards, only memory may be used to which a tensor still refers.
        """
