"""Makes torch's CPU tensors behave as if they were on a device that computes later than torch believes.

A tensor that is marked has no values until the device reaches it, and a reader that waits for an event sees only what
the device has done by then. So a missing fence shows as a wrong value.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterable, Sequence

import torch
from ddl_conform.pretend import KIND, PretendEvent, PretendQueue, PretendRuntime
from ddl_torch.streams import Mark, Streams

from ddlcore.contracts import PersistentRequest
from ddlcore.types import Buffer, Device

__all__ = ["LateStreams"]

PATIENCE_S = 120.0
GARBAGE = 0x7F  # as the bytes of a float: nearly the greatest number, or NaN


class LateStreams(Streams):
    """Streams of a pretend device; each thread has a current stream of its own on each device.

    A rank has two devices: tensors of float32 are on the second, all other tensors on the first.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._runtimes: dict[int, PretendRuntime] = {}
        self._lock = threading.Lock()
        self._queues: list[PretendQueue] = []
        self._orders = itertools.count(1)
        self.marks = 0  # how many marks were made
        self.followed = 0  # how many events a stream has waited for

    def settle_on(self, rank: int) -> None:
        """Make the calling thread belong to this rank."""
        self._own.rank = rank

    def turn_to(self, which: int) -> None:
        """Make another of the calling thread's streams the current one on each device."""
        self._own.which = which

    def place(self, tensor: torch.Tensor) -> Device | None:
        return Device(KIND, 2 * self._own.rank + (tensor.dtype is torch.float32))

    def mark(self, device: Device) -> Mark:
        self.marks += 1
        return _LateMark(self, device)

    def hold(self, device: Device, owner: object) -> tuple[object, Mark]:
        mark = self.mark(device)
        return (owner, mark), mark

    def after(self, event: int, tensors: Sequence[torch.Tensor]) -> None:
        for stream in list(self._streams().values()):
            stream.wait_for(event)
            if not stream.record().wait(PATIENCE_S):  # torch computes on the CPU at once, so the device must be done
                raise TimeoutError("the event did not come")
        self.followed += 1

    def stream(self, index: int) -> PretendQueue:
        """Return the calling thread's current stream on this device."""
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
        """Let ``tensor`` hold garbage from now on until the current stream reaches it."""
        place = self.place(tensor)
        assert place is not None
        plain = tensor.detach()
        values = plain.clone()
        plain.view(-1).view(torch.uint8).fill_(GARBAGE)
        self.stream(place.index).call(lambda: (plain.copy_(values), None)[1])
        return tensor

    def put_off_gradients(self, parameters: Iterable[torch.Tensor], seen: bool = False) -> None:
        """Delay all gradients that backward computes for these parameters.

        Call it before the optimizer is wrapped, because hooks run in the order of their registration. ``seen``:
        something else uses the gradients' memory meanwhile, so that ddl may not reduce in place.
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

        def compute() -> None:  # holds no reference to the tensor, as a device's queue holds none
            if parameter.grad is not None and parameter.grad.data_ptr() == address:
                ctypes.memmove(address, values.data_ptr(), values.nbytes)

        self.stream(place.index).call(compute)

    def order(self) -> int:
        return next(self._orders)

    def close(self) -> None:
        """End all streams."""
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

    def set(self, what: Buffer | PersistentRequest) -> None:
        stream = self._streams.stream(self._index)
        self._event = stream.record()
        what.mark_ready(self._event.handle, stream.handle, self._streams.order())
