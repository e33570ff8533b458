"""The devices of one rank's job: opened when a tensor first lies on one, each with the one queue the engine uses."""

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
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.reentry import Lock
from ddlcore.types import CPU, Buffer, Device

__all__ = ["ON_HOST", "DeviceStream", "Devices", "Pool", "describe_device", "kind_of", "label_of_stream"]

WAIT_SLICE_S = 0.1
MOST = 64  # devices of a kind that a process may see
ON_HOST = "@host"  # behind a label: reduced staged in host memory, because somebody asked for that


def kind_of(label: str) -> str:
    """The kind of device that a Spec's ``device`` names."""
    return label_of_stream(label).partition("+")[0]


def label_of_stream(label: str) -> str:
    """Which of a rank's devices a Spec's ``device`` names: its kind, and ``+1`` for the second one."""
    return label.removesuffix(ON_HOST)


def describe_device(label: str) -> str:
    """A Spec's ``device`` in words."""
    kind, _, number = label_of_stream(label).partition("+")
    nth = f", device {int(number) + 1} of the rank" if number else ""
    return f"{kind}{nth}{', by way of the host' if label.endswith(ON_HOST) else ''}"


class DeviceStream:
    """One device as the engine uses it. Its queue and all else here belong to the engine's thread.

    ``over`` says whether the job is: no wait for the device outlives it. ``used`` is told that memory is kept.
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
        """What is queued from now on comes after the values of ``buffers``: of each stream, after its last event."""
        orders = [buffer.order for buffer in buffers]
        streams = [buffer.stream for buffer in buffers]
        if buffers and 0 not in orders and streams.count(streams[0]) == len(streams):  # as hundreds of gradients do
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
        """An event behind all that is queued; ``kept``, which that uses, lives until it is done."""
        event = self.queue.record()
        self.keep(event, kept)
        return event

    def keep(self, event: Event, kept: Sequence[object]) -> None:
        """``kept`` lives until ``event`` is done."""
        self._kept.append((event, kept))
        self._used()
        self.tidy()

    def tidy(self) -> bool:
        """Lets go of what may go by now; whether something is left."""
        waiting = self._kept
        try:
            while waiting and waiting[0][0].done():
                waiting.popleft()
        except DeviceError:  # whoever waits for the event is told; nothing behind it will ever be used
            waiting.clear()
        return bool(waiting)

    def wait(self, event: Event) -> None:
        """Blocks until ``event`` is done. Raises DeviceError where the device failed, Closed when the job is over."""
        begun_ns = now_ns()
        while not event.wait(WAIT_SLICE_S):
            if self._over():
                raise Closed("the job was over before the device had done what was queued")
        self._meter.device_ns += now_ns() - begun_ns

    def close(self, timeout_s: float) -> None:
        """The job is over: waits at most so long for what is queued. What that still uses then is never let go."""
        self.queue.close(timeout_s)
        if self.tidy():  # the device may come to it yet, and write what its owner's framework would have given away
            _left_behind.append(self._kept)
        self.pool.clear()
        self.pinned.clear()
        self.runtime.close()


_left_behind: list[object] = []  # what a device may still use after its job: nobody else may get the memory


@dataclass(slots=True)
class _Piece:
    memory: Memory
    free_behind: Event | None = None

    def is_free(self) -> bool:
        return self.free_behind is None or self.free_behind.done()


class Pool:
    """Memory for a bucket, taken from what the buckets before it have given back. Of one stream; engine's thread only.

    What is used on the stream's queue alone may be given back as soon as its last use is queued, without an event.
    """

    def __init__(self, stream: DeviceStream, allocate: Callable[[int], Memory]) -> None:
        self._stream = stream
        self._allocate = allocate
        self._free: list[_Piece] = []

    def take(self, nbytes: int) -> Memory:
        """At least so many bytes; what they held is gone."""
        free = [piece for piece in self._free if piece.is_free()]
        fitting = [piece for piece in free if piece.memory.nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda piece: piece.memory.nbytes)
            self._free.remove(found)
            return found.memory
        if free:  # one that is too small makes place: as many are held as were in use at once
            self._free.remove(free[0])
            self._stream.mark((free[0].memory,))
        return self._allocate(max(nbytes, 4096))

    def give(self, memory: Memory, free_behind: Event | None = None) -> None:
        """It may be taken again; where the host writes it, only once ``free_behind`` is done."""
        self._free.append(_Piece(memory, free_behind))

    def clear(self) -> None:
        """Lets all go."""
        self._free.clear()


class Devices:
    """``make(device)`` opens a device's runtime, or raises an error that says what to do. Any thread may ask for labels."""

    def __init__(
        self,
        make: Callable[[Device], DeviceRuntime],
        own: Callable[[str, int], Device],
        over: Callable[[], bool],
        meter: Meter,
    ) -> None:
        """``own(kind, n)``: the n-th device of the kind that this rank would use, had it asked for none."""
        self._make = make
        self._own = own
        self._over = over
        self._meter = meter
        self.used: Callable[[], None] = lambda: None  # told that memory is kept, for ``tidy`` to let go
        self._lock = Lock()
        self._labels: dict[Device, str] = {CPU: CPU.kind}
        self._streams: dict[str, DeviceStream] = {}

    def label(self, device: Device, stage_on_host: bool = False) -> str:
        """What all ranks call this device: its kind, and the how-manieth of this rank it is. Opens it the first time.

        So ranks whose devices have other numbers agree, and no bucket mixes two devices. A rank that uses several
        names them in the same order as the others do. Raises what ``make`` raises.
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
        """The device of that label; this rank's own, where it has joined before it ever used one. Engine only."""
        name = label_of_stream(label)
        while name not in self._streams:
            kind = kind_of(name)
            with self._lock:
                used = {device for device in self._labels if device.kind == kind}
                device = next((one for one in map(partial(self._own, kind), range(MOST)) if one not in used), None)
                if device is None:
                    raise DeviceError(f"a bucket needs {describe_device(label)}, and this rank sees no such device")
                self._open(device)
        return self._streams[name]

    def _tell(self) -> None:
        self.used()

    def tidy(self) -> bool:
        """Lets go of memory that devices have done with; whether more is to go. Engine only."""
        left = [stream.tidy() for stream in self.streams]  # each of them
        return any(left)

    @property
    def streams(self) -> list[DeviceStream]:
        """All that are open, as they are now: a user's thread may open one at any moment."""
        return list(self._streams.values())

    def close(self, timeout_s: float) -> None:
        """Waits at most so long for all of them. Engine only, after its last bucket."""
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
            self._make = _refuse
        deadline_s = time.monotonic() + timeout_s
        for stream in streams:
            stream.close(max(deadline_s - time.monotonic(), 0.0))


def _refuse(device: Device) -> DeviceRuntime:
    raise Closed(f"the job is over; {device} is not opened any more")
