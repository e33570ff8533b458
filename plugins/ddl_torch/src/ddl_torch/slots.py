"""Keeps a record for each parameter's gradient: its name, its last type, shape and layout, and how it is reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ddl_torch.streams import Mark
from ddlcore.api import ProcessSet, UserCompressor
from ddlcore.contracts import PersistentRequest
from ddlcore.types import Buffer, DType, ReduceOp

_Request = PersistentRequest | None


@dataclass(frozen=True)
class Reduction:
    """The options with which all gradients of one optimizer are reduced."""

    op: ReduceOp
    prescale_factor: float
    postscale_factor: float
    compression: str
    user_compressor: UserCompressor | None
    sparse_as_dense: bool
    process_set: ProcessSet
    stage_dense_on_host: bool = False  # dense gradients on a device are staged in host memory
    stage_sparse_on_host: bool = False  # sparse gradients on a device are staged in host memory
    weighted: bool = False  # each rank's gradients have a weight in the average


class Passes(Protocol):
    """The part of ``BackwardPasses`` that a parameter's hook uses."""

    arrived: list[Slot]  # the slots whose gradients the pass has completed
    sends: bool  # whether gradients of the pass may be sent as they arrive

    def begin(self, param: torch.Tensor) -> None:
        """Record that a backward pass has begun: its first gradient, the gradient of ``param``, is complete."""


class Slot:
    """The record of one parameter's gradient: its name, its last type and layout, and the requests that reduce it."""

    __slots__ = (
        "agreed",
        "count",
        "device",
        "dtype",
        "first_hook",
        "group",
        "holds_result",
        "holds_sum",
        "hook",
        "kept",
        "label",
        "mark",
        "name",
        "others",
        "param",
        "passes",
        "private",
        "raw",
        "request",
        "round",
        "shape",
        "sparse_dims",
        "starts",
        "strides",
        "submit",
        "summed",
        "tensor_hook",
        "turn",
        "version",
        "weighed",
    )

    def __init__(self, param: torch.Tensor, label: str, passes: Passes) -> None:
        self.param = param
        self.label = label  # the name of the parameter
        self.name = label  # the name under which it is reduced
        self.passes = passes
        self.submit: Callable[[Slot], None] | None = None  # sends it while backward runs; None: sent at the end
        self.group: GradientGroup | None = None
        self.first_hook: RemovableHandle | None = None
        self.hook: RemovableHandle | None = None
        self.tensor_hook: RemovableHandle | None = None
        self.sparse_dims = 0  # the sparse dimensions of its last gradient; 0: that gradient was dense
        self.agreed = False  # whether a round has placed its result, so that the ranks agree on whether it is sparse
        self.round = -1  # the last round in which it was sent
        self.starts = -1  # ``starts`` of its persistent request, just before it was sent in that round
        # The persistent requests that all its gradients use as long as their type and layout stay the same. ``request``
        # reduces in place; ``private`` reduces into a separate tensor, for gradients whose memory something else uses.
        self.request: _Request = None
        self.private: _Request = None
        self.turn = 0  # the round of a step for which these two requests are
        self.others: dict[int, tuple[_Request, _Request]] = {}  # the same two requests for other rounds of a step
        self.dtype: torch.dtype | None = None
        self.shape: torch.Size | None = None
        self.count = 0
        self.strides: tuple[int, ...] | None = None  # None: row-major, and not complex
        self.device: torch.device | None = None
        self.mark: Mark | None = None  # records when its gradient is ready on its device; None: it is in host memory
        # Used only if reducing a reduced gradient again would change it (``Binding.repeatable`` is false):
        self.holds_result = False  # ``.grad`` is a reduced result, to which the next backward pass must not add
        self.kept: torch.Tensor | None = None  # that result, while the gradient of the next pass is reduced
        # Used only by an average with weights, see weighting.py:
        self.weighed = -1  # the last turn in which its gradient was weighed
        self.raw: torch.Tensor | None = None  # that gradient, while it is weighed
        self.version = -1  # the version of that gradient before it was weighed
        self.holds_sum = False  # ``.grad`` is a weighted sum, to which the next backward pass must not add
        self.summed: torch.Tensor | None = None  # that sum, while the gradient of the next pass is computed

    def on_gradient(self, param: torch.Tensor) -> None:
        """Record that the gradient is complete, and send the gradient if it may be sent now.

        Autograd calls this method once for each parameter and backward pass, so the method does as little as possible.
        """
        passes = self.passes
        arrived = passes.arrived
        if not arrived:
            passes.begin(param)
        arrived.append(self)
        if passes.sends and self.submit is not None:
            self.submit(self)

    def before_gradient(self, _grad: torch.Tensor | None) -> None:
        """Move a result of an earlier reduction out of ``.grad``, before autograd adds the gradient of this pass.

        Autograd calls it. The new gradient must be reduced alone, because reducing the earlier result again would
        change that. The sum of earlier passes is moved, too, if each pass has a weight of its own.
        """
        if self.holds_result:
            self.kept, self.param.grad = self.param.grad, None
            self.holds_result = False
        elif self.holds_sum:
            self.summed, self.param.grad = self.param.grad, None
            self.holds_sum = False

    def drop_gradients(self) -> None:
        """Drop the results and sums of earlier passes, because the gradients have been cleared."""
        self.holds_result = self.holds_sum = False
        self.kept = self.summed = self.raw = None

    def forget_look(self) -> None:
        """Drop the persistent requests, so that a new request is made for the next gradient."""
        self.request = self.private = None
        self.others = {}

    def look_like(self, grad: torch.Tensor) -> None:
        """Store the type, shape, strides and device of ``grad``.

        If one of them has changed, drop the persistent requests.
        """
        usual = grad.is_contiguous() and not grad.is_complex()  # the strides of complex ones: see ``looks_alike``
        look = (grad.dtype, grad.shape, None if usual else grad.stride(), grad.device)
        if look != (self.dtype, self.shape, self.strides, self.device):
            self.forget_look()
            self.dtype, self.shape, self.strides, self.device = look
            self.count = grad.numel()
            self.mark = None

    def change_round(self, turn: int) -> None:
        """Switch to the persistent requests that round number ``turn`` of each step uses.

        A round is one reduction of all gradients. After an interrupt, this method may be called again with the same
        ``turn``.
        """
        if self.turn != turn:
            self.others[self.turn] = (self.request, self.private)
            found = self.others.get(turn, (None, None))
            # These lines call nothing, so no interrupt can come between them. An interrupt there would make the next
            # call store the requests of one round as those of another.
            self.request, self.private = found
            self.turn = turn


class GradientGroup:
    """Parameters whose gradients are sent together, when the last of these gradients is complete."""

    __slots__ = ("_came", "_moments", "_waiting", "attempt", "name", "round", "slots")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.name = ""  # the name under which it is reduced
        self._moments: dict[Slot, Buffer] = {}  # when each gradient on a device became ready (stream, event and order)
        self.round = -1  # the last round in which it was sent
        self.attempt: Any = None  # the Attempt that sends it
        self.begin()

    def begin(self) -> None:
        """Begin to wait for all gradients of the group.

        This method is called at the start of each round, a reduction of all gradients.
        """
        self._waiting = sum(slot.param.requires_grad for slot in self.slots)
        self._came: set[Slot] = set()

    def is_complete(self, slot: Slot) -> bool:
        """Record that the gradient of ``slot`` is complete. Return whether all gradients of the group are complete.

        The counter is only a quick first test, because parameters may have been frozen or unfrozen since ``begin``.
        """
        self._came.add(slot)
        self._waiting -= 1
        return self._waiting <= 0 and all(one in self._came or not one.param.requires_grad for one in self.slots)

    def note(self, slot: Slot, grad: torch.Tensor, mark: Callable[[], Mark]) -> None:
        """Record, with an event on the current stream, when the gradient of ``slot`` is ready on its device.

        Other gradients of the group may become ready on other streams. ``mark`` is a function that returns a new Mark,
        which is an object that records the event.
        """
        if slot.mark is None or slot.device != grad.device:
            slot.mark, slot.device = mark(), grad.device
        slot.mark.set(self._moments.setdefault(slot, Buffer(0, 0, DType.U8, (0,))))

    def events_of_others(self, last: Slot) -> list[int]:
        """Return the device events to wait for before the group may be sent on the stream of ``last``.

        ``last`` is the record of the gradient that was completed last. For each other stream on which gradients of the
        group became ready, the list contains the latest event.
        """
        if last not in self._moments:
            return []
        newest: dict[int, Buffer] = {}
        for moment in sorted(self._moments.values(), key=attrgetter("order")):
            newest[moment.stream] = moment
        del newest[self._moments[last].stream]
        return [moment.event for moment in newest.values()]


def looks_alike(grad: torch.Tensor, slot: Slot) -> bool:
    """Return whether ``grad``, in host memory, has the type and layout of the last gradient of ``slot``.

    Only the values and the address of ``grad`` may differ. This function runs for every gradient, so it compares as
    little as possible. For a row-major gradient it compares the number of elements and not the shape, because the shape
    does not matter then. Only complex gradients, which always have their strides in the slot, can be conjugated views.
    """
    return (
        grad.dtype is slot.dtype
        and grad.is_cpu
        and not grad.is_sparse
        and (
            (grad.is_contiguous() and grad.numel() == slot.count)
            if slot.strides is None
            else (grad.stride() == slot.strides and grad.shape == slot.shape and not grad.is_conj())
        )
        and not grad.is_neg()
    )


def looks_alike_there(grad: torch.Tensor, slot: Slot) -> bool:
    """Return whether ``grad``, on a device, has the type, shape and layout of the last gradient of ``slot``.

    Unlike ``looks_alike``, this function always compares the shapes.
    """
    return (
        grad.dtype is slot.dtype
        and grad.device == slot.device
        and not grad.is_sparse
        and grad.shape == slot.shape
        and (grad.is_contiguous() if slot.strides is None else grad.stride() == slot.strides and not grad.is_conj())
        and not grad.is_neg()
    )
