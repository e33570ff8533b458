"""Detects when a backward pass over some parameters begins, ends or fails; knows no collective.

torch has no public event for the end of ``backward()``. The first hook of a pass queues a callback with autograd's
engine, as DistributedDataParallel does. The engine holds that callback while the pass runs. If the pass succeeds, the
engine calls it; if the pass fails, the engine drops it without a call, which a weak reference to the callback reports.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain, starmap
from typing import Any, Protocol

import torch

from ddl_torch.slots import Slot
from ddlcore.errors import IncompleteGradients

INCOMPLETE = (
    "the last backward() did not come to its end, so gradients are missing or are those of a part of the model; "
    "call optimizer.zero_grad() and compute them again"
)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Make autograd's engine call ``callback`` at the end of the running pass; ``backward()`` raises what it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class PassOwner(Protocol):
    """An object that ``BackwardPasses`` notifies of the begin and the end of each backward pass."""

    def pass_begins(self) -> bool:
        """Note the first gradient of a pass; return whether gradients may be sent as they arrive.

        An exception from this method makes ``backward()`` fail.
        """

    def pass_ended(self) -> None:
        """Note that a pass has succeeded; ``BackwardPasses.arrived`` lists the slots that it has completed."""

    def pass_failed(self) -> None:
        """Note that a pass has failed; ``BackwardPasses.arrived`` lists the slots that it has completed before."""


class _Pass:
    """Stands for one backward pass. Only the engine's callback holds it, so it is freed when the pass fails."""

    __slots__ = ("__weakref__",)


class BackwardPasses:
    """Follows the backward passes that compute gradients of some parameters. Hooks may run on autograd's threads."""

    def __init__(self, owner: PassOwner) -> None:
        self.owner = owner
        self.arrived: list[Slot] = []  # the slots whose gradients the running pass has completed
        # The parameters of these slots. The hook that appends them is ``list.append`` itself. It runs no Python code,
        # so no signal handler can interrupt it. If an interrupt hits the first ``Slot.on_gradient`` of a pass, this
        # list is the only trace of the pass.
        self.seen: list[torch.Tensor] = []
        self.sends = False  # whether gradients of the running pass may be sent as they arrive
        self.incomplete = False  # whether a pass has begun and has not ended successfully
        self.current: weakref.ref[_Pass] | None = None  # the pass that runs
        # The pass whose end has not been dealt with, and the node of the pass in which it is nested (None: in none). The
        # callback that fills it runs no Python code either: an interrupt at the end of a pass cannot make it look failed.
        self._over: list[Any] = []
        self._partial: list[tuple[Slot, torch.Tensor, int]] = []  # the gradients of a failed pass, and their versions
        self._inner = False  # whether a nested pass has ended and its outer pass still runs
        self._before: list[Slot] = []  # the slots that nested passes have completed

    def begin(self) -> None:
        """Note the first gradient of a pass. ``Slot.on_gradient`` calls it."""
        self.settle()
        # Only a live reference means that a pass runs: when a pass fails, Python clears the reference before it calls
        # ``_failed``, so for a moment ``current`` refers to a pass that is gone.
        if self.current is not None and self.current() is not None:
            return  # the hook of another device has begun this pass at the same moment, on its own thread
        if not self._inner:  # otherwise this is another nested pass, or the rest of the outer pass
            self.sends = self.owner.pass_begins()
        self._queue()

    def settle(self) -> None:
        """Deal with the last pass, if an interrupt kept ``_end`` or ``_failed`` from it. Every part may run twice."""
        if self._over:
            if self._over[1] is None:
                self._close()
            else:  # the exception went through the pass in which that pass was nested
                self._give_up()
        elif self.current is not None and self.current() is None:
            self._give_up()

    def expect_end(self) -> None:
        """Count the pass as incomplete until it ends.

        Raises IncompleteGradients if gradients of a failed pass are still in ``.grad``: this pass would add to them.
        """
        if self.incomplete:
            if any(slot.param.grad is grad and grad._version == version for slot, grad, version in self._partial):
                raise IncompleteGradients(INCOMPLETE)
            self._partial = []
        self.incomplete = True

    def forget(self) -> None:
        """Forget all passes, because their gradients have been cleared."""
        self.current = None
        self._over.clear()
        self.seen.clear()
        self.arrived.clear()
        self._before.clear()
        self._partial = []
        self._inner = self.incomplete = False

    def round_ended(self) -> None:
        """Forget which gradients have arrived, because they are reduced."""
        self._inner = False
        self._before.clear()
        self.seen.clear()
        self.arrived.clear()

    def _queue(self) -> None:
        this = _Pass()
        self.current = weakref.ref(this, self._failed)
        node = starmap(torch._C._current_autograd_node, ((),))  # asked when the callback runs; torch has no public name
        at_end_of_backward(partial(self._over.extend, chain((this,), node)))
        at_end_of_backward(self._end)

    def _end(self) -> None:
        """Deal with the end of a pass. The engine calls it."""
        if not self._over:
            return
        node = self._over[1]
        if node is not None and self._goes_on(node):
            return
        self._close()
        self.owner.pass_ended()

    def _close(self) -> None:
        self.arrived[:0] = self._before
        self._before.clear()
        self._inner = False
        self.seen.clear()
        self.incomplete = False
        self.current = None
        self._over.clear()

    def _goes_on(self, node: Any) -> bool:
        """Return whether the pass that has ended was nested in the pass that runs ``node``, and that pass goes on.

        Re-entrant checkpointing does that. The outer pass continues with the graph nodes that follow ``node``. A hook
        on these nodes queues other callbacks, so that ``_end`` is called again when the outer pass ends.
        """
        # The engine runs the callbacks that were queued in a nested pass at the end of that nested pass, so there is no
        # callback yet for the end of the outer pass. None can be queued from here either: the nested pass still counts
        # as the running one. The next nodes of the outer pass are the first place where one can be queued.
        handles: list[Any] = []

        def go_on(_gradients: Any) -> None:
            for handle in handles:
                handle.remove()
            if handles and self._inner and (self.current is None or self.current() is None):
                self._queue()
            handles.clear()

        for behind, _ in node.next_functions:
            if behind is not None:
                handles.append(behind.register_prehook(go_on))
        if not handles:
            return False
        self._inner = True
        self._before += self.arrived
        self.arrived.clear()
        self.current = None
        self._over.clear()
        return True

    def _failed(self, this: weakref.ref[_Pass]) -> None:
        """Note that a pass has failed. Python calls it when the engine drops the callback of that pass uncalled.

        An exception here, as that of an interrupt, is lost: ``settle`` does again what it has kept from being done.
        """
        if self.current is this:
            self._give_up()

    def _give_up(self) -> None:
        self._inner = False
        self.arrived += self._before
        self._before.clear()
        grads = [(slot, slot.param.grad) for slot in self.arrived]
        if grads:
            self._partial = [(slot, grad, grad._version) for slot, grad in grads if grad is not None]
        self.owner.pass_failed()
        self.arrived.clear()
        self.current = None
        self._over.clear()
