"""What is known of each parameter's gradient: its name, what it looked like last, and how it is reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ddl_torch.streams import Mark
from ddlcore.api import ProcessSet, UserCompressor
from ddlcore.types import Buffer, DType, ReduceOp

__all__ = ["Group", "Passes", "Reduction", "Slot", "looks_alike", "looks_alike_there"]


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
    stage_dense_on_host: bool = False  # gradients of a device are staged in host memory
    stage_sparse_on_host: bool = False  # sparse ones do


class Passes(Protocol):
    """What a parameter's hook asks of the running backward pass."""

    arrived: list[Slot]  # the slots whose gradients the pass has completed
    sends: bool  # whether gradients of the pass may be sent as they arrive

    def begin(self) -> None:
        """Note the first gradient of a backward pass."""


class Slot:
    """One parameter's gradient."""

    __slots__ = (
        "agreed",
        "count",
        "device",
        "dtype",
        "first_hook",
        "group",
        "holds_result",
        "hook",
        "kept",
        "label",
        "mark",
        "name",
        "others",
        "param",
        "passes",
        "private",
        "request",
        "round",
        "shape",
        "sparse_dims",
        "starts",
        "strides",
        "submit",
        "tensor_hook",
    )

    def __init__(self, param: torch.Tensor, label: str, passes: Passes) -> None:
        self.param = param
        self.label = label  # the parameter's name
        self.name = label  # on the wire
        self.passes = passes
        self.submit: Callable[[Slot], None] | None = None  # sends a gradient while backward runs; None: at its end
        self.group: Group | None = None
        self.first_hook: RemovableHandle | None = None
        self.hook: RemovableHandle | None = None
        self.tensor_hook: RemovableHandle | None = None
        self.sparse_dims = 0  # of its last gradient; 0: that was dense
        self.agreed = False  # it was reduced as a sparse one before: all ranks know that it is
        self.round = -1  # the last round in which it was sent
        self.starts = -1  # ``starts`` of what reduces it, just before it was sent in that round
        # The allreduces that its gradients have in common while they look alike: in place, and where something else
        # sees a gradient's memory, into a tensor of our own.
        self.request: Any = None
        self.private: Any = None
        self.others: dict[int, tuple[Any, Any]] = {}  # the same of other rounds of a step
        self.dtype: torch.dtype | None = None
        self.shape: torch.Size | None = None
        self.count = 0
        self.strides: tuple[int, ...] | None = None  # None: row-major
        self.device: torch.device | None = None
        self.mark: Mark | None = None  # says when its gradient stands; None: that lies in host memory
        # Where reducing a reduced gradient once more would change it:
        self.holds_result = False  # the gradient is a result, to which the next backward pass must not add
        self.kept: torch.Tensor | None = None  # that result, while what was added to it is reduced

    def on_gradient(self, _param: torch.Tensor) -> None:
        """Called by autograd once a parameter and backward pass, so it is as short as can be."""
        passes = self.passes
        arrived = passes.arrived
        if not arrived:
            passes.begin()
        arrived.append(self)
        if passes.sends and self.submit is not None:
            self.submit(self)

    def before_gradient(self, _grad: torch.Tensor | None) -> None:
        """Called by autograd before it adds to ``.grad``: a result is put aside, and what is added stands by itself."""
        if self.holds_result:
            self.kept, self.param.grad = self.param.grad, None
            self.holds_result = False

    def forget_look(self) -> None:
        """Have the next gradient described anew."""
        self.request = self.private = None
        self.others = {}

    def look_like(self, grad: torch.Tensor) -> None:
        """Note what is the same of ``grad`` and of the gradients to come; what is not has them described anew."""
        look = (grad.dtype, grad.shape, None if grad.is_contiguous() else grad.stride(), grad.device)
        if look != (self.dtype, self.shape, self.strides, self.device):
            self.forget_look()
            self.dtype, self.shape, self.strides, self.device = look
            self.count = grad.numel()
            self.mark = None

    def change_round(self, before: int, now: int) -> None:
        """Put the allreduces of round ``before`` of a step aside, and take up those of round ``now``."""
        self.others[before] = (self.request, self.private)
        self.request, self.private = self.others.get(now, (None, None))


class Group:
    """Parameters whose gradients go off together, when the last of them is complete."""

    __slots__ = ("_came", "_moments", "_waiting", "attempt", "name", "round", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.name = ""  # on the wire
        self._moments: dict[Slot, Buffer] = {}  # when the gradients of those on a device stood
        self.round = -1  # the last in which it was sent
        self.attempt: Any = None  # what it is sent by
        self.begin()

    def begin(self) -> None:
        """Await all of them again."""
        self._waiting = sum(slot.param.requires_grad for slot in self.slots)
        self._came: set[Slot] = set()

    def is_complete(self, slot: Slot) -> bool:
        """Note that ``slot`` has come, and return whether none is missing.

        The count alone does not know who was thawed or frozen since ``begin``.
        """
        self._came.add(slot)
        self._waiting -= 1
        return self._waiting <= 0 and all(one in self._came or not one.param.requires_grad for one in self.slots)

    def note(self, slot: Slot, grad: torch.Tensor, mark: Callable[[], Mark]) -> None:
        """The gradient of ``slot`` has come to a device, on the stream that is current; others may come on other streams."""
        if slot.mark is None or slot.device != grad.device:
            slot.mark, slot.device = mark(), grad.device
        slot.mark.set(self._moments.setdefault(slot, Buffer(0, 0, DType.U8, (0,))))

    def events_of_others(self, last: Slot) -> list[int]:
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
