"""Makes ``.grad`` the reduced gradient by the end of ``backward()``; knows no optimizer.

The path of one gradient: autograd calls ``Slot.on_gradient``; at the end of the backward pass ``BackwardPasses`` calls
``Reducer.pass_ended``, which has ``Sender.send_all`` (sending.py) send every gradient, zeros for those that this rank
has not computed; then results.py waits and puts results where they belong. Where gradients are reduced while backward
runs (``job.overlaps``, and on devices always), ``Slot.on_gradient`` sends each as it arrives. The host waits for no
device, neither in a hook nor at the end: the current streams do.

A gradient is reduced in place where nothing else sees its memory (memory.py), else into memory of our own.

One such reduction of all gradients is a *round* (rounds.py), which an interrupt leaves open to be continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ddl_torch.autograd import ADAPTER
from ddl_torch.memory import mark_written
from ddl_torch.passes import INCOMPLETE, BackwardPasses, at_end_of_backward
from ddl_torch.results import place, wait
from ddl_torch.rounds import Round
from ddl_torch.sending import Sender, bind
from ddl_torch.slots import Group, Reduction, Slot
from ddlcore.errors import IncompleteGradients, NotInitialized
from ddlcore.types import CPU

__all__ = ["Reducer", "UnfinishedBackward"]

LOST = (
    "ddl was shut down while the gradients of this step were reduced, so they are lost; "
    "call optimizer.zero_grad() and compute them again"
)
UNFINISHED = (
    "the last backward() was interrupted after some of its gradients had been sent to the other ranks, which wait for "
    "the rest; call optimizer.synchronize() to complete or to end that step before the next backward()"
)


class UnfinishedBackward(AssertionError, RuntimeError):
    """Gradients of an interrupted backward pass were sent, and nothing else can be done before that has ended."""


class Reducer:
    """All gradients of one optimizer. Used by the thread that trains; hooks may come from autograd's threads.

    It holds the job that was current when it was made. After ``shutdown()`` and another ``init()`` it goes
    over to the new one at the next step, if nothing was under way.
    """

    def __init__(self, reduction: Reduction, passes_per_round: int) -> None:
        self.reduction = reduction
        self.passes_per_round = passes_per_round
        self.slots: list[Slot] = []
        self.groups: list[Group] = []
        self.touched = False  # a backward pass has computed gradients since the last round
        self.reduced = False  # a round has ended since the last step or zero_grad
        self.failed: Exception | None = None  # why the last round gave no result
        self.round = Round()
        self.passes = BackwardPasses(self)
        self._passes_left = passes_per_round  # until a backward pass ends with a round
        self._local = 0  # how many ``no_sync`` contexts are open
        self._sender = Sender(reduction, self.round, self.slots, self.groups)
        self._follow_binding()

    @property
    def open(self) -> bool:
        """Whether a round is under way."""
        return self.round.open

    def _follow_binding(self) -> None:
        """Take over what the sender is bound to: the job, and whether this rank takes part."""
        binding = self._sender.binding
        self.job = binding.job
        self.active = binding.active
        self._repeatable = binding.repeatable
        self._overlaps = self.job.overlaps

    # --- parameters

    def add(self, named: Sequence[tuple[str, torch.Tensor]], sparse: bool = False) -> list[Slot]:
        """Watch these parameters too. ``sparse``: what steps on them takes no other gradients."""
        added = [Slot(param, name, self.passes) for name, param in named]
        for slot in added:
            slot.sparse_dims = int(sparse)
            self._prepare(slot)
        self._name_devices(added)
        for slot in added:
            self._watch(slot)
        self.slots += added
        return added

    def add_group(self, slots: Sequence[Slot]) -> None:
        """Send these gradients together from now on."""
        group = Group(slots)
        for slot in slots:
            slot.group = group
            self._prepare(slot)
        self.groups.append(group)
        self._name_groups()

    def give_up(self, slot: Slot) -> None:
        """Leave a parameter to the optimizer that has been made for it later: one of two must reduce its gradient."""
        if self.open:
            raise UnfinishedBackward(UNFINISHED)
        if slot.hook is not None:
            _unhook(slot)
        self.slots[:] = [one for one in self.slots if one is not slot]
        if slot.group is not None:
            rest = [one for one in slot.group.slots if one is not slot]
            self.groups.remove(slot.group)
            if rest:
                self.add_group(rest)

    def _prepare(self, slot: Slot) -> None:
        """Decide on which way its gradients go, and under which name."""
        slot.name = self._sender.binding.prefix + slot.label
        slot.submit = self._sender.way_out(slot, slot.param)

    def _name_groups(self) -> None:
        for group in self.groups:
            group.name = "group." + group.slots[0].name

    def _name_devices(self, slots: Sequence[Slot]) -> None:
        """Give devices their numbers in the order of the parameters: hooks run on a thread for each, in no order."""
        for where in dict.fromkeys(ADAPTER.streams.place(slot.param) for slot in slots):
            if self.active and where is not None and where is not CPU:
                self.job.device_label(where)

    def _watch(self, slot: Slot) -> None:
        param = slot.param
        if not self.active or slot.hook is not None or not param.is_leaf:
            return
        if not (param.is_floating_point() or param.is_complex()):
            return  # never has a gradient
        for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
            other = getattr(hook, "__self__", None)
            owner = getattr(other.passes, "owner", None) if isinstance(other, Slot) else None
            if not isinstance(other, Slot) or not isinstance(owner, Reducer):
                continue
            # In a world of threads the other may be another rank's, which is left alone.
            if owner.job is self.job or owner.job.closed:
                owner.give_up(other)
        required = param.requires_grad
        if not required:  # torch refuses the hook, which must be there should the parameter be thawed
            param.requires_grad_(True)
        slot.first_hook = param.register_post_accumulate_grad_hook(self.passes.seen.append)
        slot.hook = param.register_post_accumulate_grad_hook(slot.on_gradient)
        if not self._repeatable:
            slot.tensor_hook = param.register_hook(slot.before_gradient)
        if not required:
            param.requires_grad_(False)

    def release(self) -> None:
        """Take the hooks off: parameters, hooks and slots would keep each other alive."""
        for slot in self.slots:
            if slot.hook is not None:
                _unhook(slot)

    # --- backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes add up gradients on this rank alone."""
        if self.open:
            raise UnfinishedBackward(UNFINISHED)
        self._local += 1
        try:
            yield
        finally:
            self._local -= 1

    def set_passes_per_round(self, passes: int) -> None:
        """Have every ``passes``-th backward pass end with a round, counted from the next one on."""
        self.passes_per_round = self._passes_left = passes

    def pass_begins(self) -> bool:
        """``BackwardPasses`` calls it with the first gradient of a pass."""
        if self.job.closed:
            self._rebind()
        if self.open:
            raise UnfinishedBackward(UNFINISHED)
        self.passes.expect_end()
        self.failed = None
        sends = self.active and self._local == 0 and self._passes_left == 1
        if sends and self._sender.eager:
            self._sender.begin_round()
        self.touched = True
        return sends

    def pass_ended(self) -> None:
        """``BackwardPasses`` calls it at the end of ``backward()``, which raises what this raises."""
        if self.passes.sends:
            self._send()
            # Wait behind what other optimizers send at the end of this pass: which of them take part, and in which
            # order, may differ between ranks, and who waited first would keep the others' gradients back.
            at_end_of_backward(self._complete)
            return
        if self._local == 0:
            self._passes_left -= 1
        self.passes.arrived.clear()

    def pass_failed(self) -> None:
        """``BackwardPasses`` calls it when a pass has ended with an exception.

        Where nothing was sent, the program may skip the step or compute it again. Where some of it was, other ranks wait
        for the rest, so the round stays open; ``synchronize`` ends it, by an error on all ranks.
        """
        if self.open and not self.round.has_sent(self.slots):
            self.round.open = False
        self.round.entered = self.open

    # --- rounds

    def wants_round(self) -> bool:
        """Whether ``.grad`` is not yet what it is to be before a step."""
        return self.open or self.touched or not self.reduced

    def synchronize(self) -> None:
        """Reduce what has not been reduced; no effect where ``.grad`` is reduced already.

        Raises the first error of any gradient when all are over; and that again, until gradients are computed anew.
        """
        if self.failed is not None:
            raise self.failed.with_traceback(None)
        if self.passes.seen:  # the first hook of a pass was interrupted
            self.passes.incomplete = True
        if self.passes.incomplete and not self.open:
            raise IncompleteGradients(INCOMPLETE)
        if self.wants_round():
            self.reduce()

    def reduce(self) -> None:
        """Run a round, or go on with the open one. Every member of the process set takes part."""
        self._send()
        self._complete()

    def _send(self) -> None:
        if self.job.closed:
            self._rebind()
        if not self.active:
            return
        if not self.open:
            self._sender.begin_round()
        self._sender.send_all(self.passes.arrived, self.passes.incomplete)

    def _complete(self) -> None:
        """Wait for all of a round, and end it."""
        wait(self._sender, self.passes.incomplete)
        place(self.round, self.slots, self._repeatable)
        self._end_round()

    def _end_round(self) -> None:
        round, passes = self.round, self.passes
        # Where all gradients had been sent when the pass was interrupted, nothing is missing: other ranks go on with them.
        failure = round.failure or (IncompleteGradients(INCOMPLETE) if round.ended else None)
        if round.written:
            mark_written(round.written)
            round.written.clear()
        if not self._repeatable:
            for slot in self.slots:
                slot.holds_result = slot.round == round.number
        round.clear(self.groups)
        passes.seen.clear()
        passes.arrived.clear()
        if self.job.overlaps is not self._overlaps:  # a search has changed it
            self._overlaps = self.job.overlaps
            for slot in self.slots:
                slot.submit = self._sender.way_out(slot, slot.param)
        # An interrupt before this line leaves the round open, with nothing left to do; between these there is none.
        passes.current = None
        round.failure = None
        round.entered = round.open = round.ended = self.touched = False
        passes.incomplete = passes.incomplete and failure is not None
        self._passes_left = self.passes_per_round
        round.of_step += 1
        self.reduced = failure is None
        self.failed = failure
        if failure is not None:
            raise failure

    def next_step(self) -> None:
        """The optimizer has stepped: the gradients to come are another step's."""
        self.begin_names_anew()
        self.reduced = self.touched = False
        self._passes_left = self.passes_per_round

    def begin_names_anew(self) -> None:
        """Name the next round as the first of a step, on every rank."""
        self.round.of_step = 0

    def discard(self) -> None:
        """The gradients are gone, whether they had been reduced or not."""
        if self.open and self.job.closed:
            self._forget()
        self.reduced = self.touched = False
        self.failed = None
        if not self.open:
            self.passes.forget()
        self._passes_left = self.passes_per_round
        if not self._repeatable:
            for slot in self.slots:
                slot.holds_result = False
                slot.kept = None

    # --- jobs

    def _rebind(self) -> None:
        """Go over to the job that is current now."""
        if self.open:
            self._forget()
            raise NotInitialized(LOST)
        self._sender.binding = bind(self.reduction)
        self._follow_binding()
        for slot in self.slots:
            slot.forget_look()
            self._prepare(slot)
        self._name_groups()
        if self.active:
            self._name_devices(self.slots)
            for slot in self.slots:
                self._watch(slot)
        else:
            self.release()
        self.round.of_step = self.round.turn = 0

    def _forget(self) -> None:
        """The job of an open round has ended: its gradients will not be reduced."""
        self.round.forget(self.groups)
        self.passes.forget()


def _unhook(slot: Slot) -> None:
    for hook in (slot.first_hook, slot.hook, slot.tensor_hook):
        if hook is not None:
            hook.remove()
    slot.first_hook = slot.hook = slot.tensor_hook = None
