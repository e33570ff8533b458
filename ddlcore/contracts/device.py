"""The device contract: the memory, ordered queues and events of one kind of accelerator, and its kernels.

The field calls a queue a stream. What is put on one queue runs in order, later than the call that put it
there; queues wait for one another by events. Nothing here waits for the device unless it says so.

* Addresses are numbers: of the device's memory, of pinned host memory, or of any host memory where a call says so.
* Memory that a queued call uses is kept alive by who queued it, until an event recorded behind it is done.
  Sequences of addresses and counts are read before the call returns.
* Calls may come from any thread; of one queue from one thread at a time. The thread's own current device
  and stream, which belong to the user's framework, are as before when a call returns.
* Foreign errors are mapped in one function, to DeviceError with its cause.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory
from ddlcore.types import Device, DType

__all__ = ["DeviceRuntime", "Event", "Queue"]


class Event(ABC):
    """A moment of a queue: it is done when everything that was queued before it has run."""

    handle: int = 0  # the device library's own, such as a cudaEvent_t, which any framework can wait for

    @abstractmethod
    def done(self) -> bool:
        """Whether it has come; returns at once. Raises DeviceError where the device failed before it."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Blocks this thread, without the GIL, until it has come; False when ``timeout_s`` passed first.

        Raises as ``done``.
        """


class Queue(ABC):
    """One stream of one device."""

    handle: int = 0  # the device library's own, such as a cudaStream_t
    runtime: DeviceRuntime  # that made it
    kernels: Kernels  # whose calls are put on this queue and return at once; addresses are the device's

    @abstractmethod
    def record(self) -> Event:
        """The moment that everything queued so far has run."""

    @abstractmethod
    def wait_for(self, event: int) -> None:
        """What is queued from now on waits for the event of that handle, of whatever library.

        The event may be recorded anew, or gone, when this has returned.
        """

    @abstractmethod
    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copies between any two memories of device and pinned host, which do not overlap."""

    @abstractmethod
    def packer(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[Sequence[int], int], None]:
        """``pack`` of a bucket that comes again and again, arranged once: called with (sources, target)."""

    @abstractmethod
    def unpacker(
        self, counts: Sequence[int], dtype: DType, wire: DType, scale: float
    ) -> Callable[[int, Sequence[int]], None]:
        """Likewise ``unpack``: called with (source, targets)."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits at most so long for what is queued, and lets go; idempotent. Raises nothing of what the device did."""


class DeviceRuntime(ABC):
    """One device, as this process sees it. Built without arguments; ``open`` comes first."""

    device: Device
    identity: str = (
        ""  # of the very device (or part of one, such as a MIG instance): equal for all who see it, on its host
    )

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """How many devices of the kind this process sees; 0 where there are none, or no driver. Raises nothing."""

    @abstractmethod
    def open(self, device: Device) -> None:
        """Raises DeviceError, saying what to do, where there is no such device, no driver, or no memory."""

    @abstractmethod
    def queue(self) -> Queue:
        """A new queue, which waits for no other."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Memory of the device, aligned to 512 bytes; freed with its last reference, when the device is done with it."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Memory:
        """Host memory that queues copy from and to without a detour; freed likewise."""

    def current(self) -> AbstractContextManager[object]:
        """Within it, libraries that ask which device is the calling thread's find this one; then the thread's own is back."""
        return nullcontext()

    def close(self) -> None:
        """Its queues have been closed, and nothing of it is used any more but memory that a tensor holds. Idempotent."""
