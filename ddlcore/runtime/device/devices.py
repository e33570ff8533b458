"""Keeps the open devices of one rank's job. A device is opened at its first use, and has one queue for the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.device import DeviceRuntime, Event, Queue
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.transport import Memory
from ddlcore.errors import Closed, DeviceError
from ddlcore.reentry import Lock
from ddlcore.runtime.device_labels import ON_HOST, describe_device, kind_of, label_of_stream
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.types import CPU, Buffer, Device

WAIT_SLICE_S = 0.1
MOST = 64  # the most devices of one kind that a process may see


class DeviceStream:
    """One device, with the queue and the memory that the engine uses on it. Only the engine's thread uses this object.

    ``over`` returns whether the job is over; no wait for the device may last longer than the job. ``used`` is called
    each time that this object begins to keep memory which must be released later.
    """

    def __init__(
        self, runtime: DeviceRuntime, over: Callable[[], bool], meter: Meter, used: Callable[[], None]
    ) -> None:
        self.runtime = runtime
        self.device = runtime.device
        self.queue: Queue = runtime.queue()
        self.kernels: Kernels = self.queue.kernels
        self.compressors: dict[str, Compressor] = {}
        self.pool = Pool(self, runtime.allocate)
        self.pinned = Pool(self, runtime.pinned)
        self._over = over
        self._meter = meter
        self._used = used
        self._kept: deque[tuple[Event, Sequence[object]]] = deque()

    def after(self, buffers: Sequence[Buffer]) -> None:
        """Make all work that is queued from now on wait until the values of ``buffers`` are complete.

        Each buffer may have an event after which its values are complete. If several buffers come from the same stream
        of the user, the queue waits only for the last of their events.
        """
        orders = [buffer.order for buffer in buffers]
        streams = [buffer.stream for buffer in buffers]
        if buffers and 0 not in orders and streams.count(streams[0]) == len(streams):  # the usual case: one stream
            self.queue.wait_for(buffers[orders.index(max(orders))].event)
            return
        newest: dict[int, tuple[int, int]] = {}
        for buffer in buffers:
            if buffer.event and not buffer.order:
                self.queue.wait_for(buffer.event)
            elif buffer.event and buffer.order > newest.get(buffer.stream, (0, 0))[0]:
                newest[buffer.stream] = (buffer.order, buffer.event)
        for _, event in newest.values():
            self.queue.wait_for(event)

    def mark(self, kept: Sequence[object]) -> Event:
        """Return an event that is done when all work that has been queued so far has run.

        That work uses the objects in ``kept``, so they stay alive until the event is done.
        """
        event = self.queue.record()
        self.keep(event, kept)
        return event

    def keep(self, event: Event, kept: Sequence[object]) -> None:
        """Keep the objects in ``kept`` alive until ``event`` is done."""
        self._kept.append((event, kept))
        self._used()
        self.tidy()

    def tidy(self) -> bool:
        """Release the kept objects whose events are done. Return whether other objects are still kept."""
        waiting = self._kept
        try:
            while waiting and waiting[0][0].done():
                waiting.popleft()
        except DeviceError:  # a waiter gets the error, and no memory after the event is used again
            waiting.clear()
        return bool(waiting)

    def wait(self, event: Event) -> None:
        """Wait until ``event`` is done. Raises DeviceError if the device has failed, and Closed if the job is over."""
        begun_ns = now_ns()
        while not event.wait(WAIT_SLICE_S):
            if self._over():
                raise Closed("the job was over before the device had done what was queued")
        self._meter.device_ns += now_ns() - begun_ns

    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for the queued work, and close the device.

        If the queued work has not ended by then, the device may still use some memory. That memory is never released.
        """
        self.queue.close(timeout_s)
        if self.tidy():  # the device may still write there, and its owner could reuse that memory
            _left_behind.append(self._kept)
        self.pool.clear()
        self.pinned.clear()
        self.runtime.close()


_left_behind: list[object] = []  # memory that a device may still use after its job, so nobody may reuse it


@dataclass(slots=True)
class _Piece:
    memory: Memory
    free_behind: Event | None = None

    def is_free(self) -> bool:
        return self.free_behind is None or self.free_behind.done()


class Pool:
    """A pool of memory for the buckets of one stream. Only the engine's thread uses the pool.

    Memory that only work on the stream's queue uses may be given back as soon as its last use is queued. No event is
    needed then, because the next use of the memory is queued after the last one.
    """

    def __init__(self, stream: DeviceStream, allocate: Callable[[int], Memory]) -> None:
        self._stream = stream
        self._allocate = allocate
        self._free: list[_Piece] = []

    def take(self, nbytes: int) -> Memory:
        """Return memory of at least ``nbytes`` bytes, with undefined contents."""
        free = [piece for piece in self._free if piece.is_free()]
        fitting = [piece for piece in free if piece.memory.nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda piece: piece.memory.nbytes)
            self._free.remove(found)
            return found.memory
        if free:  # replace a piece that is too small, so that no more pieces are held than were in use at once
            self._free.remove(free[0])
            self._stream.mark((free[0].memory,))
        return self._allocate(max(nbytes, 4096))

    def give(self, memory: Memory, free_behind: Event | None = None) -> None:
        """Give ``memory`` back to the pool.

        Memory to which the host writes needs ``free_behind``: the memory may be taken again only when this event is
        done.
        """
        self._free.append(_Piece(memory, free_behind))

    def clear(self) -> None:
        """Release all memory that is in the pool."""
        self._free.clear()


class Devices:
    """The open devices of one rank.

    ``make(device)`` opens a device's runtime, or raises an error that contains advice for the user. Any thread may call
    ``label``.
    """

    def __init__(
        self,
        make: Callable[[Device], DeviceRuntime],
        own: Callable[[str, int], Device],
        over: Callable[[], bool],
        meter: Meter,
    ) -> None:
        """Create the object, with no device open.

        ``own(kind, n)`` returns the n-th device of ``kind`` that this rank chooses by itself, with n from 0. ``over``
        returns whether the job is over.
        """
        self._make = make
        self._own = own
        self._over = over
        self._meter = meter
        self.untidy = False  # whether memory is kept that ``tidy`` must release
        self._lock = Lock()
        self._labels: dict[Device, str] = {CPU: CPU.kind}
        self._streams: dict[str, DeviceStream] = {}

    def label(self, device: Device, stage_on_host: bool = False) -> str:
        """Return the label of ``device`` for a Spec, and open the device if it is not open.

        The label is the device's kind; for the second and further devices that this rank uses, a number is added. So
        all ranks use the same label even if their devices have different numbers, and no bucket contains tensors of two
        devices. Ranks that use several devices must make their first use of these devices in the same order. With
        ``stage_on_host``, the label also says that the tensor is reduced in host memory. Raises the error of opening
        the device if that fails.
        """
        label = self._labels.get(device)
        if label is None:
            self._lock.refuse("an operation")
            with self._lock:
                label = self._labels.get(device) or self._open(device)
        return label + ON_HOST if stage_on_host and device.kind != CPU.kind else label

    def _open(self, device: Device) -> str:
        number = sum(1 for known in self._labels if known.kind == device.kind)
        label = f"{device.kind}+{number}" if number else device.kind
        self._streams[label] = DeviceStream(self._make(device), self._over, self._meter, self._tell)
        self._labels[device] = label
        return label

    def stream(self, label: str) -> DeviceStream:
        """Return the stream of the device with the label ``label``. Only the engine's thread may call this.

        This rank may not have used such a device before, because it has joined. Then it chooses a device by itself, and
        opens it.
        """
        name = label_of_stream(label)
        while name not in self._streams:
            kind = kind_of(name)
            with self._lock:
                candidates = map(partial(self._own, kind), range(MOST))
                device = next((one for one in candidates if one not in self._labels), None)
                if device is None:
                    raise DeviceError(f"a bucket needs {describe_device(label)}, and this rank sees no such device")
                self._open(device)
        return self._streams[name]

    def _tell(self) -> None:
        self.untidy = True

    def tidy(self) -> None:
        """Release memory that devices no longer use. ``untidy`` stays True if more memory must be released later.

        Only the engine's thread may call this.
        """
        left = [stream.tidy() for stream in self.streams]  # a list, so that ``tidy`` is called for each of them
        self.untidy = any(left)

    @property
    def streams(self) -> list[DeviceStream]:
        """Return the streams of all devices that are open now. A user thread may open another device at any moment."""
        return list(self._streams.values())

    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds in total for the queued work of all devices, and close the devices.

        Only the engine's thread may call this, after its last bucket.
        """
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
            self._make = _refuse
        deadline_s = time.monotonic() + timeout_s
        for stream in streams:
            stream.close(max(deadline_s - time.monotonic(), 0.0))


def _refuse(device: Device) -> DeviceRuntime:
    raise Closed(f"the job is over; {device} is not opened any more")
