"""Detects when a backward pass over some parameters begins, ends or fails. Runs no collective.

torch has no public event for the end of ``backward()``. So the first hook of a pass queues a callback with autograd's
engine, as DistributedDataParallel does. The engine keeps that callback while the pass runs. If the pass succeeds, the
engine calls the callback. If the pass fails, the engine deletes the callback without calling it. Then an object that
only the callback refers to is freed, and a weak reference to this object reports the failure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain, starmap
from typing import Any, Protocol

import torch

from ddl_torch.slots import Slot
from ddlcore.contracts import JobService
from ddlcore.errors import IncompleteGradients

INCOMPLETE = (
    "the last backward() did not come to its end, so gradients are missing or are those of a part of the model; "
    "call optimizer.zero_grad() and compute them again"
)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Make autograd's engine call ``callback`` at the end of the running backward pass.

    If ``callback`` raises an exception, ``backward()`` raises that exception.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class PassOwner(Protocol):
    """An object that ``BackwardPasses`` notifies of the beginning and the end of each backward pass."""

    job: JobService  # in which it reduces the gradients of the passes

    def pass_begins(self) -> bool:
        """Prepare for a backward pass, and return whether gradients of this pass may be sent as they arrive.

        ``BackwardPasses`` calls this method when the first gradient of the pass is complete. Autograd has already added
        that gradient to ``.grad``. An exception from this method makes ``backward()`` fail.
        """

    def pass_ended(self) -> None:
        """Handle the success of a backward pass.

        ``BackwardPasses.finished`` lists one slot (the record of a parameter) for each gradient that the pass has
        completed.
        """

    def pass_failed(self) -> None:
        """Handle the failure of a backward pass.

        During this call, ``BackwardPasses`` still knows which gradients the pass has completed. It forgets them after
        the call.
        """

    def give_up(self, slot: Slot) -> None:
        """Stop reducing the gradient of ``slot``, because another owner reduces it from now on."""


class _Pass:
    """An object that represents one backward pass.

    Only a callback in autograd's engine refers to this object, so Python frees the object if the pass fails.
    """

    __slots__ = ("__weakref__",)


class BackwardPasses:
    """An observer of the backward passes that compute gradients of some parameters. It notifies ``owner`` of each pass.

    Autograd may run the hooks of this observer on its own threads.
    """

    def __init__(self, owner: PassOwner) -> None:
        self.owner = owner
        self.arrived: list[Slot] = []  # the slots whose gradients the running pass has completed
        self.finished: list[Slot] = []  # the slots whose gradients the last pass has completed, until a round has ended
        # Whether the gradients of the last pass wait for a round. An interrupt at the end of a pass leaves this True, and
        # the next pass must not begin then: it would send its gradients when the other ranks expect the last ones.
        self.unsent = False
        # The parameters of these slots. The hook that appends them is ``list.append`` itself. It runs no Python code,
        # so no signal handler can interrupt it. If an interrupt hits the first ``Slot.on_gradient`` of a pass, this
        # list is the only trace of the pass.
        self.seen: list[torch.Tensor] = []
        self.sends = False  # whether gradients of the running pass may be sent as they arrive
        self.incomplete = False  # whether a pass has begun and has not ended successfully
        self.current: weakref.ref[_Pass] | None = None  # the pass that runs
        # Empty, or the pass that has ended and whose end is not recorded yet, followed by the node of the outer pass in
        # which it is nested (None: not nested) and by the slots that it has completed. The callbacks that fill this list
        # and empty ``arrived`` run no Python code either, so an interrupt at the end of a pass can make neither this
        # pass look failed nor the next one look begun.
        self._over: list[Any] = []
        # The parameters of a failed pass, with the gradients that it has left there, and the versions of these.
        self._partial: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._inner = False  # whether a nested pass has ended and its outer pass still runs
        self._before: list[Slot] = []  # the slots that nested passes have completed

    def begin(self, param: torch.Tensor) -> None:
        """Record that a backward pass has begun: its first gradient, the gradient of ``param``, is complete.

        ``Slot.on_gradient`` calls this method.
        """
        self.settle()
        if not self.seen:  # ``settle`` has cleared it
            self.seen.append(param)
        # Only a live reference means that a pass runs: when a pass fails, Python clears the reference before it calls
        # ``_failed``, so for a moment ``current`` refers to a pass that no longer exists.
        if self.current is not None and self.current() is not None:
            return  # the hook of another device has begun this pass at the same moment, on its own thread
        if not self._inner:  # otherwise this is another nested pass, or the rest of the outer pass
            self.sends = self.owner.pass_begins()
        self._queue()

    def settle(self) -> None:
        """Record the end of the last backward pass, if an interrupt has kept ``_end`` or ``_failed`` from doing so.

        An interrupt is an exception that a signal handler raises. It may also end this method early. Each part of this
        method may safely run twice.
        """
        if self._over:
            if self._over[1] is None:
                self._close()
            else:  # the exception has also ended the pass in which that pass was nested
                self._give_up()
        elif self.current is not None and self.current() is None:
            self._give_up()

    def expect_end(self) -> None:
        """Count the running backward pass as incomplete until it ends.

        Raises IncompleteGradients if gradients of a failed pass are still in ``.grad``, because the running pass would
        add its gradients to them.
        """
        if self.incomplete:
            if any(param.grad is grad and grad._version == version for param, grad, version in self._partial):
                raise IncompleteGradients(INCOMPLETE)
            self._partial = []
        self.incomplete = True

    def refuse(self) -> None:
        """Count the last backward pass as failed, because a new pass has already added to some of its gradients.

        The new pass has begun too early, so the caller refuses it.
        """
        self._keep_partial([*(slot.param for slot in self.finished), *self.seen])
        self.finished = []
        self.unsent = False
        self.incomplete = True

    def forget(self) -> None:
        """Forget all backward passes, because their gradients have been cleared."""
        self.current = None
        self._over.clear()
        self.arrived.clear()
        self.round_ended()
        self._partial = []
        self.incomplete = False

    def round_ended(self) -> None:
        """Forget which gradients have arrived, because the reduction of these gradients has ended."""
        self.seen.clear()
        self._inner = self.unsent = False
        self.finished = []
        self._before = []

    def _queue(self) -> None:
        this = _Pass()
        self.current = weakref.ref(this, self._failed)
        node = starmap(torch._C._current_autograd_node, ((),))  # asked when the callback runs; torch has no public name
        at_end_of_backward(partial(self._over.extend, chain((this,), node, (self.arrived,))))
        at_end_of_backward(partial(setattr, self, "arrived", []))
        at_end_of_backward(self._end)

    def _end(self) -> None:
        """Record the end of a backward pass, and notify the owner. Autograd's engine calls this method.

        If the pass was nested in an outer pass that is still running, this method does not notify the owner yet.
        """
        if not self._over:
            return
        node = self._over[1]
        if node is not None and self._goes_on(node):
            return
        self._close()
        self.owner.pass_ended()

    def _close(self) -> None:
        self.seen.clear()
        slots = [*self._before, *self._over[2]]
        # No interrupt can come between these lines, as they call nothing; else a second run would lose ``_before``.
        self.finished = self._over[2] = slots
        self._before = []
        self.unsent = self.sends
        self._inner = self.incomplete = False
        self.current = None
        self._over.clear()

    def _goes_on(self, node: Any) -> bool:
        """Return whether the backward pass that has ended was nested in an outer pass that is still running.

        Re-entrant checkpointing nests passes in this way. ``node`` is the graph node of the outer pass in which the
        nested pass ran. The outer pass continues with the graph nodes that follow ``node``. This method adds a hook to
        these nodes. The hook queues new callbacks, so that ``_end`` is called again when the outer pass ends.
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
        slots = [*self._before, *self._over[2]]
        self._inner = True  # from here to the last line nothing is called, see ``_close``
        self._before = slots
        self._over[2] = []
        self.current = None
        self._over.clear()
        return True

    def _failed(self, this: weakref.ref[_Pass]) -> None:
        """Handle a failed backward pass. ``this`` is the weak reference to the pass.

        Python calls this method when the engine deletes the callback of the pass without calling that callback. If an
        interrupt raises an exception in this method, Python does not pass the exception on to a caller. Then ``settle``
        later does the rest of the work.
        """
        if self.current is this:
            self._give_up()

    def _give_up(self) -> None:
        slots = [*(self._over[2] if self._over else self.arrived), *self._before]
        if slots:
            self._keep_partial([slot.param for slot in slots])
        self.owner.pass_failed()
        self.arrived.clear()
        self.finished = []
        self._before = []
        self._inner = False
        self.current = None
        self._over.clear()

    def _keep_partial(self, params: list[torch.Tensor]) -> None:
        grads = [(param, param.grad) for param in params]
        self._partial = [(param, grad, grad._version) for param, grad in grads if grad is not None]
