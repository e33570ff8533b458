"""The device contract: the memory, the queues, the events and the kernels of one kind of accelerator.

Other libraries call a queue a stream. The work on one queue runs in order, some time after the calls that have enqueued
the work. Queues wait for each other by means of events. No call waits for the device, unless its docstring says so.

* An address is a number. It is an address in device memory or in pinned host memory, or in any host memory if the
  docstring of a call says so.
* The caller keeps the memory that a call uses alive until the work of the call is complete: record an event after the
  call, and keep the memory until the event is done. The call reads sequences of addresses and counts before it returns.
* Any thread may make calls. Calls on one queue come from one thread at a time. A call does not change the thread's
  current device and current stream, because these belong to the user's framework.
* One function converts the errors of the device's library to DeviceError, with the library's error as the cause.
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
    """A point in a queue. The event is done when all work that was enqueued before this point has run."""

    handle: int = 0  # the device library's handle, such as a cudaEvent_t; any framework can wait for it

    @abstractmethod
    def done(self) -> bool:
        """Return whether the event is done, without waiting. Raises DeviceError if the device has already failed."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the event is done, and return True. The GIL is released during the wait.

        Return False if ``timeout_s`` seconds pass before the event is done. Raises the same errors as ``done``.
        """


class Queue(ABC):
    """One ordered queue (stream) of work on one device."""

    handle: int = 0  # the device library's handle, such as a cudaStream_t
    runtime: DeviceRuntime  # the runtime that created this queue
    kernels: Kernels  # each call enqueues work on this queue and returns at once; addresses are of device memory

    @abstractmethod
    def record(self) -> Event:
        """Return a new event that is done when all work that is in the queue now has run."""

    @abstractmethod
    def wait_for(self, event: int) -> None:
        """Make all work that is enqueued on this queue from now on wait for the event with the handle ``event``.

        Any library may have created the event. After this method has returned, the event may be recorded again or
        destroyed.
        """

    @abstractmethod
    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Enqueue a copy of ``nbytes`` bytes from the address ``source`` to the address ``target``.

        The two ranges must not overlap. Each range is in device memory or in pinned host memory.
        """

    @abstractmethod
    def packer(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[Sequence[int], int], None]:
        """Return a function that does the same as ``Kernels.pack``, for a bucket that is run repeatedly.

        The function has the parameters (sources, target). All other arguments of ``Kernels.pack`` are fixed by this
        call.
        """

    @abstractmethod
    def unpacker(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[int, Sequence[int]], None]:
        """Return a function that does the same as ``Kernels.unpack``, for a bucket that is run repeatedly.

        The function has the parameters (source, targets). All other arguments of ``Kernels.unpack`` are fixed by this
        call.
        """

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until the enqueued work has run, and release the queue.

        A second call has no effect. If the work has failed on the device, this method raises no error.
        """


class DeviceRuntime(ABC):
    """The access of this process to one device. The class is built without arguments, and ``open`` is called first."""

    device: Device
    identity: str = ""  # name of the physical device, or of a MIG instance; equal for all processes on the host

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many devices of this kind the process sees. This never raises an error.

        The result is 0 if there is no such device or no driver.
        """

    @abstractmethod
    def open(self, device: Device) -> None:
        """Open ``device``. Raises DeviceError, with advice, if there is no such device, no driver, or no memory."""

    @abstractmethod
    def queue(self) -> Queue:
        """Return a new queue. The work on this queue does not wait for the work on other queues."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Return device memory of ``nbytes`` bytes. Its address is a multiple of 512.

        The memory is freed when there is no reference to the Memory object any more and the device has finished the
        work that uses the memory.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> Memory:
        """Return pinned host memory of ``nbytes`` bytes. Queues can copy from and to such memory directly.

        The memory is freed under the same conditions as the memory that ``allocate`` returns.
        """

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager that makes this device the calling thread's current device.

        At the end of the ``with`` block, the former current device is restored. This is for calls of libraries that use
        the calling thread's current device.
        """
        return nullcontext()

    def close(self) -> None:
        """Release the runtime. A second call has no effect.

        All queues of this runtime must have been closed before. After this call, memory that the runtime has returned
        may be used only as long as a tensor refers to the memory.
        """
