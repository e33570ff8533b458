"""What is known of each parameter's gradient: its name, how many passes it awaits, what it looked like last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ddl_torch.streams import Mark
from ddlcore.api import ProcessSet, UserCompressor
from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["Group", "Reduction", "Slot", "looks_alike", "looks_alike_there"]

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


@dataclass(frozen=True)
class Reduction:
    """How every gradient is reduced."""

    op: ReduceOp
    prescale_factor: float
    postscale_factor: float
    compression: str
    user_compressor: UserCompressor | None
    sparse_as_dense: bool
    process_set: ProcessSet
    dense_by_host: bool = False  # gradients of a device go by way of the host's memory
    sparse_by_host: bool = False  # sparse ones do


class Slot:
    """One parameter: how many backward passes it still awaits before its gradient goes off (0: it is complete)."""

    __slots__ = (
        "count",
        "device",
        "dtype",
        "group",
        "hook",
        "left",
        "mark",
        "name",
        "param",
        "recurring",
        "shape",
        "sparse_dims",
        "strides",
        "submit",
    )

    def __init__(self, param: torch.Tensor, name: str, left: int, submit: Callable[[Slot], None]) -> None:
        self.param = param
        self.name = name  # on the wire
        self.left = left
        self.submit = submit
        self.group: Group | None = None
        self.hook: RemovableHandle | None = None
        self.sparse_dims = 0  # of its last gradient; 0: that was dense
        self.recurring: Any = None  # the allreduce that its gradients have in common, while they look like the first
        self.dtype: torch.dtype | None = None
        self.shape: torch.Size | None = None
        self.count = 0
        self.strides: tuple[int, ...] | None = None  # None: row-major
        self.device: torch.device | None = None
        self.mark: Mark | None = None  # says when its gradient stands; None: that lies in host memory

    def on_gradient(self, _param: torch.Tensor) -> None:
        """What autograd calls, once a parameter and backward pass: as short as can be."""
        left = self.left = self.left - 1
        if left == 0:
            self.submit(self)
        elif left < 0:
            self.left = 0
            raise AssertionError(TOO_MANY_PASSES)


class Group:
    """Parameters whose gradients go off together, when the last of them is complete."""

    __slots__ = ("_moments", "name", "sent", "slots", "waiting")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._moments: dict[Slot, Buffer] = {}  # when the gradients of those on a device stood
        self.name = "group." + slots[0].name  # on the wire
        self.begin()

    def begin(self) -> None:
        """Awaits all of them again."""
        self.sent = False
        self.waiting = sum(slot.param.requires_grad for slot in self.slots)

    def is_complete(self) -> bool:
        """Whether all have come; the count alone does not know who was thawed or frozen meanwhile."""
        self.waiting -= 1
        return self.waiting <= 0 and all(slot.left == 0 or not slot.param.requires_grad for slot in self.slots)

    def note(self, slot: Slot, grad: torch.Tensor, mark: Callable[[], Mark]) -> None:
        """The gradient of ``slot`` has come to a device, on the stream that is current; others may come on other streams."""
        if slot.mark is None or slot.device != grad.device:
            slot.mark, slot.device = mark(), grad.device
        slot.mark.set(self._moments.setdefault(slot, Buffer(0, 0, DType.U8, (0,))))

    def elsewhere(self, last: Slot) -> list[int]:
        """The events behind the gradients that have come on other streams than that of ``last``."""
        if last not in self._moments:
            return []
        newest: dict[int, Buffer] = {}
        for moment in sorted(self._moments.values(), key=attrgetter("order")):
            newest[moment.stream] = moment
        del newest[self._moments[last].stream]
        return [moment.event for moment in newest.values()]


def looks_alike(grad: torch.Tensor, slot: Slot) -> bool:
    """Whether ``grad`` differs from the slot's last one by its values and its address at most.

    Each look costs: most gradients are row-major, and there as many elements do as an equal shape.
    """
    return (
        grad.dtype is slot.dtype
        and grad.is_cpu
        and not grad.is_sparse
        and (
            (grad.is_contiguous() and grad.numel() == slot.count)
            if slot.strides is None
            else (grad.stride() == slot.strides and grad.shape == slot.shape)
        )
        and not grad.is_neg()
    )


def looks_alike_there(grad: torch.Tensor, slot: Slot) -> bool:
    """As ``looks_alike``, of a gradient on a device."""
    return (
        grad.dtype is slot.dtype
        and grad.device == slot.device
        and not grad.is_sparse
        and grad.shape == slot.shape
        and (grad.is_contiguous() if slot.strides is None else grad.stride() == slot.strides)
        and not grad.is_neg()
    )
