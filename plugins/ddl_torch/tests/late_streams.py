"""Torch's CPU tensors as if they lay on a pretend device, on which everything happens later than torch believes.

A tensor that is marked has no values until the device comes to them, and whoever goes on after an event sees what
the device has done by then, no more. So a fence that is missing shows as a wrong value.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterable, Sequence

import torch
from ddl_torch.streams import Mark, Streams

from ddlcore.testing.pretend import KIND, PretendEvent, PretendQueue, PretendRuntime
from ddlcore.types import Buffer, Device

__all__ = ["LateStreams"]

PATIENCE_S = 120.0
GARBAGE = 0x7F  # bytes: of floats nearly the greatest, or NaN


class LateStreams(Streams):
    """Each thread has a current stream of its own on each device.

    A rank has two: the tensors of float32 lie on the second, all others on the first.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._runtimes: dict[int, PretendRuntime] = {}
        self._lock = threading.Lock()
        self._queues: list[PretendQueue] = []
        self._orders = itertools.count(1)
        self.marks = 0  # made
        self.followed = 0  # events that a stream has waited for

    def settle_on(self, rank: int) -> None:
        """The calling thread is this rank's."""
        self._own.rank = rank

    def turn_to(self, which: int) -> None:
        """Another of the calling thread's streams is its current one on each device."""
        self._own.which = which

    def place(self, tensor: torch.Tensor) -> Device | None:
        return Device(KIND, 2 * self._own.rank + (tensor.dtype is torch.float32))

    def mark(self, device: Device) -> Mark:
        self.marks += 1
        return _LateMark(self, device)

    def hold(self, buffer: Buffer) -> None:
        mark = self.mark(buffer.device)
        mark.set(buffer)
        buffer.owner = (buffer.owner, mark)

    def after(self, event: int, tensors: Sequence[torch.Tensor]) -> None:
        for stream in list(self._streams().values()):
            stream.wait_for(event)
            if not stream.record().wait(PATIENCE_S):  # torch computes on the CPU, now
                raise TimeoutError("the event did not come")
        self.followed += 1

    def stream(self, index: int) -> PretendQueue:
        """The calling thread's own on this device, the one that is current."""
        mine = self._streams()
        key = index, getattr(self._own, "which", 0)
        if key not in mine:
            with self._lock:
                runtime = self._runtimes.get(index)
                if runtime is None:
                    runtime = self._runtimes[index] = PretendRuntime()
                    runtime.open(Device(KIND, index))
                mine[key] = runtime.queue()
                self._queues.append(mine[key])
        return mine[key]

    def put_off(self, tensor: torch.Tensor) -> torch.Tensor:
        """From now on, and until the current stream comes to it, ``tensor`` holds garbage."""
        place = self.place(tensor)
        assert place is not None
        plain = tensor.detach()
        values = plain.clone()
        plain.view(-1).view(torch.uint8).fill_(GARBAGE)
        self.stream(place.index).call(lambda: (plain.copy_(values), None)[1])
        return tensor

    def put_off_gradients(self, parameters: Iterable[torch.Tensor], seen: bool = False) -> None:
        """All that backward will compute for these. Before the optimizer is wrapped: hooks run in their order.

        ``seen``: something else sees the gradients' memory meanwhile, so that ddl may not reduce in place.
        """
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._hook_seen if seen else self._hook)

    def _hook_seen(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if not parameter.grad.is_sparse:
            self.put_off(parameter.grad)

    def _hook(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        place = self.place(grad)
        assert place is not None
        if grad.is_sparse:
            return
        values, address = grad.clone(), grad.data_ptr()
        ctypes.memset(address, GARBAGE, values.nbytes)

        def compute() -> None:  # holds no tensor of this memory, as a device's queue holds none
            if parameter.grad is not None and parameter.grad.data_ptr() == address:
                ctypes.memmove(address, values.data_ptr(), values.nbytes)

        self.stream(place.index).call(compute)

    def order(self) -> int:
        return next(self._orders)

    def close(self) -> None:
        """Ends all streams."""
        for queue in self._queues:
            queue.close(PATIENCE_S)

    def _streams(self) -> dict[tuple[int, int], PretendQueue]:
        try:
            found: dict[tuple[int, int], PretendQueue] = self._own.streams
        except AttributeError:
            found = self._own.streams = {}
        return found


class _LateMark(Mark):
    def __init__(self, streams: LateStreams, device: Device) -> None:
        self._streams = streams
        self._index = device.index
        self._event: PretendEvent | None = None

    def set(self, buffer: Buffer) -> None:
        stream = self._streams.stream(self._index)
        self._event = stream.record()
        buffer.event, buffer.stream, buffer.order = self._event.handle, stream.handle, self._streams.order()
