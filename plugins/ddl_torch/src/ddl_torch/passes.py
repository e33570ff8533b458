"""Tells when a backward pass over some parameters begins, ends or fails; knows no collective.

torch has no public event for the end of ``backward()``. The first hook of a pass queues a callback with autograd's
engine, as DistributedDataParallel does. The engine keeps that callback as long as the pass runs and drops it when the
pass fails, so that a weak reference to it tells the two apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ddl_torch.slots import Slot
from ddlcore.errors import IncompleteGradients

__all__ = ["INCOMPLETE", "BackwardPasses", "PassOwner", "at_end_of_backward"]

INCOMPLETE = (
    "the last backward() did not come to its end, so gradients are missing or are those of a part of the model; "
    "call optimizer.zero_grad() and compute them again"
)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd's engine call ``callback`` when the pass that runs is over. What it raises, ``backward()`` raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class PassOwner(Protocol):
    """What is told of backward passes."""

    def pass_begins(self) -> bool:
        """The first gradient is there. Return whether gradients may be sent as they arrive; raise to end the pass."""

    def pass_ended(self) -> None:
        """All gradients of the pass are there, in ``BackwardPasses.arrived``."""

    def pass_failed(self) -> None:
        """The pass ended with an exception; what ``BackwardPasses.arrived`` holds is all that it has computed."""


class _Pass:
    """The callback of one backward pass. The engine keeps it as long as the pass runs, so it dies with one that fails."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self, end: Callable[[_Pass], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end(self)


class BackwardPasses:
    """Follows the backward passes that compute gradients of some parameters. Hooks may come on autograd's threads."""

    def __init__(self, owner: PassOwner) -> None:
        self.owner = owner
        self.arrived: list[Slot] = []  # the slots whose gradients the running pass has completed
        # The same parameters, noted by a hook without Python code, which no signal's handler can interrupt: where the
        # first ``Slot.on_gradient`` of a pass was interrupted, nothing else tells that there was a pass.
        self.seen: list[torch.Tensor] = []
        self.sends = False  # whether gradients of the running pass may be sent as they arrive
        self.incomplete = False  # a pass has begun and has not come to its end
        self.current: weakref.ref[_Pass] | None = None  # the pass that runs
        self._partial: list[tuple[Slot, torch.Tensor, int]] = []  # what a failed pass computed, with its versions
        self._inner = False  # a pass within an outer pass has ended, and the outer pass goes on
        self._before: list[Slot] = []  # the slots that such inner passes have completed

    def begin(self) -> None:
        """Note the first gradient of a pass. ``Slot.on_gradient`` calls it."""
        if self.current is not None and self.current() is not None:
            return  # hooks of another device have begun the pass just now, on their thread
        if not self._inner:  # else this is another pass within the same outer pass, or the outer pass itself
            self.sends = self.owner.pass_begins()
        self._queue()

    def expect_end(self) -> None:
        """Count the pass as incomplete until it ends.

        Raises IncompleteGradients where gradients of a failed pass are still there: this pass would add to them.
        """
        if self.incomplete:
            if any(slot.param.grad is grad and grad._version == version for slot, grad, version in self._partial):
                raise IncompleteGradients(INCOMPLETE)
            self._partial = []
        self.incomplete = True

    def forget(self) -> None:
        """Forget what passes have computed: their gradients are gone."""
        self.seen.clear()
        self.arrived.clear()
        self._before.clear()
        self._partial = []
        self._inner = self.incomplete = False

    def _queue(self) -> None:
        this = _Pass(self._end)
        self.current = weakref.ref(this, self._failed)
        at_end_of_backward(this)

    def _end(self, this: _Pass) -> None:
        if self.current is None or self.current() is not this:
            return
        self.current = None  # first: the traceback of an interrupt may keep ``this`` alive
        if self._is_inner():
            return
        self.arrived[:0] = self._before
        self._before.clear()
        self._inner = False
        self.seen.clear()
        self.incomplete = False
        self.owner.pass_ended()

    def _is_inner(self) -> bool:
        """Return whether the pass that has ended ran within another pass, as re-entrant checkpointing does it.

        The outer pass goes on with the nodes behind the one that ran the inner pass. A hook on these nodes queues
        another callback, so that ``_end`` is called once more when the outer pass is over.
        """
        node = torch._C._current_autograd_node()  # of the outer pass; there is no public name for it
        handles: list[Any] = []

        def go_on(_gradients: Any) -> None:
            for handle in handles:
                handle.remove()
            if handles and self._inner and (self.current is None or self.current() is None):
                self._queue()
            handles.clear()

        for behind, _ in node.next_functions if node is not None else ():
            if behind is not None:
                handles.append(behind.register_prehook(go_on))
        if not handles:
            return False
        self._inner = True
        self._before += self.arrived
        self.arrived.clear()
        return True

    def _failed(self, this: weakref.ref[_Pass]) -> None:
        """The engine has dropped the callback without a call: the pass ended with an exception."""
        if self.current is not this:
            return
        self.current = None
        self._inner = False
        self.arrived += self._before
        self._before.clear()
        grads = [(slot, slot.param.grad) for slot in self.arrived]
        self._partial = [(slot, grad, grad._version) for slot, grad in grads if grad is not None]
        self.owner.pass_failed()
        self.arrived.clear()
