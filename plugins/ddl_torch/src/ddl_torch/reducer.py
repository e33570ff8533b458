"""Makes ``.grad`` the reduced gradient by the end of ``backward()``; knows no optimizer.

The path of one gradient: autograd calls ``Slot.on_gradient``, and at the end of the backward pass ``Reducer.reduce``,
which sends what is complete, takes part with zeros for what this rank has not computed, waits, and puts results where
they belong. Where gradients are reduced while backward runs (``job.overlaps``, and on devices always), the hook sends
each as it arrives. No host waits for a device, neither in a hook nor in ``reduce``: the current streams do.

A gradient is reduced in place where nothing else sees its memory (memory.py), else into memory of our own.

One such reduction of all gradients is a *round*. It can be continued: an exception that a signal's handler raises
leaves the round open, and the next ``synchronize`` or ``step`` goes on where it was. No gradient is sent twice in a
round, whatever interrupts it: ``Slot.round`` says that one was about to be sent, and ``Recurring.starts`` that it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ddl_torch.autograd import ADAPTER, OPERATIONS
from ddl_torch.memory import ALONE, is_alone, mark_written, pin_size, use_count
from ddl_torch.slots import Group, Reduction, Slot, looks_alike, looks_alike_there
from ddl_torch.sparse import SparseHandle, start_sparse
from ddlcore.api import Handle, Mapped, UserCompressor, Waitable, current_job, global_process_set
from ddlcore.errors import DdlInternalError, IncompleteGradients, MismatchError, NotInitialized
from ddlcore.types import CPU, Average

__all__ = ["Reducer", "UnfinishedBackward"]

SPARSE = "a sparse gradient made dense"
MOST_ROUNDS = 64  # of one step that have names of their own: a loop that never steps must not fill the memory

LOST = (
    "ddl was shut down while the gradients of this step were reduced, so they are lost; "
    "call optimizer.zero_grad() and compute them again"
)
UNFINISHED = (
    "the last backward() was interrupted after some of its gradients had been sent to the other ranks, which wait for "
    "the rest; call optimizer.synchronize() to complete or to end that step before the next backward()"
)
INCOMPLETE = (
    "the last backward() did not come to its end, so gradients are missing or are those of a part of the model; "
    "call optimizer.zero_grad() and compute them again"
)
ENDED = "a backward pass that did not come to its end"  # what the other ranks read in the table of a MismatchError
ACCUMULATED_AGAIN = (
    "the gradient of {name!r} was computed a second time within one backward(), while its reduction was under way: "
    "re-entrant checkpointing of a shared parameter does that. Use torch.utils.checkpoint(..., use_reentrant=False), "
    "or DDL_OVERLAP=off, which reduces gradients at the end of backward()"
)


class UnfinishedBackward(AssertionError, RuntimeError):
    """Gradients of an interrupted backward pass were sent, and nothing else can be done before that has ended."""


class _Result(NamedTuple):
    """Where the result of a gradient that is not reduced in place goes."""

    grad: torch.Tensor
    value: torch.Tensor
    fresh: bool  # autograd made ``grad`` in this pass, so that nobody can expect the result in its memory


class _Attempt:
    """What one gradient, or a group, is sent by, where that is no recurring allreduce. An interrupted one goes on."""

    __slots__ = ("context", "done", "handle", "handles")

    def __init__(self) -> None:
        self.done = False  # its result was taken
        self.handles: list[Handle] = []  # whose operations were, or were about to be, submitted
        self.context: Any = None  # of what was submitted
        self.handle: Waitable | None = None  # when all was submitted

    def go_on(self) -> list[Handle]:
        """Return the handles of what was submitted before an interrupt, in order."""
        self.handles[:] = [handle for handle in self.handles if handle.submitted]
        return self.handles


class _Pass:
    """One backward pass. torch keeps it as long as the pass runs, so it dies with one that fails."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self, end: Callable[[_Pass], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end(self)


class Reducer:
    """All gradients of one optimizer. Used by the thread that trains; hooks may come from autograd's threads.

    It holds the job that was current when it was made. After ``shutdown()`` and another ``init()`` it goes
    over to the new one at the next step, if nothing was under way.
    """

    def __init__(self, reduction: Reduction, passes: int) -> None:
        self.reduction = reduction
        self.passes = passes
        self.passes_left = passes  # until a backward pass ends with a round
        self.slots: list[Slot] = []
        self.groups: list[Group] = []
        self.arrived: list[Slot] = []  # whose gradients the backward pass that runs has completed
        # The same parameters, noted by a hook without Python code, which no signal's handler can keep from it: where
        # the first ``Slot.on_gradient`` of a pass was interrupted, nothing else tells that there was a pass.
        self._seen: list[torch.Tensor] = []
        self.sends = False  # whether the pass that runs ends with a round
        self.touched = False  # a backward pass has computed gradients since the last round
        self.reduced = False  # a round has ended since the last step or zero_grad
        self.rounds = 0  # since the last step
        self.open = False  # a round is under way
        self.failed: Exception | None = None  # why the last round gave no result
        self.incomplete = False  # a backward pass has begun, and not come to its end
        self._partial: list[tuple[Slot, torch.Tensor, int]] = []  # what it had computed, and the versions of that
        self._local = 0  # how many ``no_sync`` contexts are open
        self._pass: weakref.ref[_Pass] | None = None  # the backward pass that runs
        self._inner = False  # a pass within an outer one has ended, and that one goes on
        self._before: list[Slot] = []  # what such passes have completed
        self._turn = 0  # which round of a step the slots' allreduces are for
        # Of the round that is under way:
        self._round = 0
        self._entered = False  # ``_send`` was, or a pass that had begun to send has failed
        self._in_flight: list[Any] = []  # allreduces of memory of this host that were started, and were not waited for
        self._on_devices: list[Any] = []  # the same of devices
        self._attempts: dict[Slot, _Attempt] = {}
        self._ended = False  # other ranks were told that some gradients will not come
        self._results: dict[Slot, _Result] = {}
        self._placed: set[Slot] = set()  # whose results are where they belong
        self._written: list[torch.Tensor] = []  # in place
        self._absent: set[Slot] = set()  # this rank takes part with zeros
        self._repeated: set[Slot] = set()  # sent once more since ranks disagreed on which gradient is sparse
        self._failure: Exception | None = None
        self._eager = False  # some gradient is sent while backward runs
        self.bind()

    def bind(self) -> None:
        """Belong to the current job from now on. Raises NotInitialized where there is none."""
        self.job = current_job()
        process_set = self.reduction.process_set
        members = range(self.job.size) if process_set is global_process_set else process_set.ranks
        if process_set.process_set_id is None:
            raise ValueError(f"{process_set} is not registered; pass it to init() or add_process_set() first")
        self.active = self.job.rank in members and len(members) > 1
        self._overlaps = self.job.overlaps
        # Two models may have parameters of the same names, and both gradients may be under way at once (a GAN's).
        ordinal = self.job.next_ordinal(f"optimizer.{process_set.process_set_id}") if self.active else 0
        self._prefix = "gradient." if ordinal == 0 else f"gradient.{ordinal}."
        # An average of equal values is these values: an average may be reduced again with what was added to it.
        compressor = self.job.compressor(self.reduction.compression)
        self._repeatable = (
            self.reduction.op is Average
            and self.reduction.user_compressor is None
            and (compressor.casts or self.reduction.compression == "none")
        )
        self._reduce = partial(
            OPERATIONS.allreduce_async,
            op=self.reduction.op,
            prescale_factor=self.reduction.prescale_factor,
            postscale_factor=self.reduction.postscale_factor,
            compression=self.reduction.compression,
            process_set=process_set,
            job=self.job,
            by_host=self.reduction.dense_by_host,
        )
        self._describe: Callable[..., Any] = partial(OPERATIONS.recurring_allreduce, **self._reduce.keywords)
        self._reduce_group: Callable[..., Waitable] = partial(
            OPERATIONS.grouped_allreduce_async, **self._reduce.keywords
        )
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

    # --- parameters

    def add(self, named: Sequence[tuple[str, torch.Tensor]], sparse: bool = False) -> list[Slot]:
        """Watch these parameters too. ``sparse``: what steps on them takes no other gradients."""
        added = [Slot(param, name, self) for name, param in named]
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
        self.slots = [one for one in self.slots if one is not slot]
        if slot.group is not None:
            rest = [one for one in slot.group.slots if one is not slot]
            self.groups.remove(slot.group)
            if rest:
                self.add_group(rest)

    def _prepare(self, slot: Slot) -> None:
        """Decide on which way its gradients go, and under which name."""
        slot.name = self._prefix + slot.label
        slot.submit = self._way_out(slot, slot.param)

    def _name_groups(self) -> None:
        for group in self.groups:
            group.name = "group." + group.slots[0].name

    def _name_devices(self, slots: Sequence[Slot]) -> None:
        """Give devices their numbers in the order of the parameters: hooks run on a thread for each, in no order."""
        for place in dict.fromkeys(ADAPTER.streams.place(slot.param) for slot in slots):
            if self.active and place is not None and place is not CPU:
                self.job.device_label(place)

    def _way_out(self, slot: Slot, tensor: torch.Tensor) -> Callable[[Slot], None] | None:
        """What a complete gradient on the device of ``tensor`` does at once; None where the end of backward sees to it."""
        on_device = ADAPTER.streams.place(tensor) is not CPU
        self._eager = self._eager or on_device or self.job.overlaps
        if slot.group is not None:
            return self._submit_member if on_device or self.job.overlaps else None
        if on_device:
            return self._submit_on_device
        return self._submit if self.job.overlaps else None

    def _watch(self, slot: Slot) -> None:
        param = slot.param
        if not self.active or slot.hook is not None or not param.is_leaf:
            return
        if not (param.is_floating_point() or param.is_complex()):
            return  # never has a gradient
        for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
            other = getattr(hook, "__self__", None)
            if not isinstance(other, Slot) or not isinstance(other.reducer, Reducer):
                continue
            # In a world of threads the other may be another rank's, which is left alone.
            if other.reducer.job is self.job or other.reducer.job.closed:
                other.reducer.give_up(other)
        required = param.requires_grad
        if not required:  # torch refuses the hook, which must be there should the parameter be thawed
            param.requires_grad_(True)
        slot.first_hook = param.register_post_accumulate_grad_hook(self._seen.append)
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

    def begin_pass(self) -> None:
        """Called with the first gradient of a backward pass: from here on torch calls ``_end_pass`` at its end."""
        if self._pass is not None and self._pass() is not None:
            return  # hooks of another device have begun it just now, on their thread
        if self._inner:  # another pass within the same outer one, or that one's own gradients
            self._queue_pass()
            return
        if self.job.closed:
            self._rebind()
        if self.open:
            raise UnfinishedBackward(UNFINISHED)
        if self.incomplete:
            if any(slot.param.grad is grad and grad._version == version for slot, grad, version in self._partial):
                raise IncompleteGradients(INCOMPLETE)
            self._partial = []
        self.incomplete = True  # until the pass has ended
        self.failed = None
        self.sends = self.active and self._local == 0 and self.passes_left == 1
        if self.sends and self._eager:
            self._open_round()
        self.touched = True
        self._queue_pass()

    def _queue_pass(self) -> None:
        this = _Pass(self._end_pass)
        self._pass = weakref.ref(this, self._abandoned)
        torch.autograd.Variable._execution_engine.queue_callback(this)

    def _end_pass(self, this: _Pass) -> None:
        """Called by torch when a backward pass is over. What it raises, ``backward()`` raises."""
        if self._pass is None or self._pass() is not this:
            return
        self._pass = None  # first: the traceback of an interrupt may keep ``this`` alive
        if self._is_inner():
            return
        self.arrived[:0] = self._before
        self._before.clear()
        self._inner = False
        self._seen.clear()
        self.incomplete = False
        if self.sends:
            self._send()
            # Wait behind what other optimizers send at the end of this pass: which of them take part, and in which
            # order, may differ between ranks, and who waited first would keep the others' gradients back.
            torch.autograd.Variable._execution_engine.queue_callback(self._complete)
            return
        if self._local == 0:
            self.passes_left -= 1
        self.arrived.clear()

    def _is_inner(self) -> bool:
        """Whether the pass that has ended is one within another, as re-entrant checkpointing runs them.

        Then the outer one goes on with the nodes behind that which runs the inner one, and will call ``_end_pass``.
        """
        node = torch._C._current_autograd_node()  # of the outer pass; there is no public name for it
        handles: list[Any] = []

        def go_on(_gradients: Any) -> None:
            for handle in handles:
                handle.remove()
            if handles and self._inner and (self._pass is None or self._pass() is None):
                self._queue_pass()
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

    def _abandoned(self, this: weakref.ref[_Pass]) -> None:
        """A backward pass has died: with an exception, where it has not come to its end.

        Where nothing was sent, the program may skip the step or compute it again. Where some of it was, other ranks wait
        for the rest, so the round stays open; ``synchronize`` ends it, by an error on all ranks.
        """
        if self._pass is not this:
            return
        self._pass = None
        self._inner = False
        self.arrived += self._before
        self._before.clear()
        grads = [(slot, slot.param.grad) for slot in self.arrived]
        self._partial = [(slot, grad, grad._version) for slot, grad in grads if grad is not None]
        if self.open and not any(slot.round == self._round for slot in self.slots):
            self.open = False
        self._entered = self.open
        self.arrived.clear()

    def _open_round(self) -> None:
        turn = self.rounds % MOST_ROUNDS
        if turn != self._turn:  # another round of the step: a rank that has had fewer of them must not meet this one
            for slot in self.slots:
                slot.turn(self._turn, turn)
            self._turn = turn
        self._again = self.job.again  # another function while a timeline is recorded
        self._round += 1
        self.open = True

    def _on_wire(self, name: str) -> str:
        return name if self._turn == 0 else f"{name}.backward{self._turn + 1}"

    # --- one gradient, while backward runs

    def _submit(self, slot: Slot) -> None:
        """Runs once a parameter and step: a gradient that looks like the last one costs as little as can be."""
        if slot.round == self._round:
            raise RuntimeError(ACCUMULATED_AGAIN.format(name=slot.label))
        grad = slot.param.grad
        assert grad is not None
        recurring = slot.recurring
        if recurring is not None and looks_alike(grad, slot):
            storage = grad.untyped_storage()
            if use_count(storage._cdata) == ALONE:
                pin_size(grad)
                slot.starts, slot.round = recurring.starts, self._round
                self._again(recurring, grad.data_ptr(), storage)
                self._in_flight.append(recurring)
                self._written.append(grad)
                return
        self._try_to_submit(slot, grad)
        if not grad.is_sparse:
            pin_size(grad)

    def _submit_on_device(self, slot: Slot) -> None:
        """``_submit`` of a gradient on a device, of which the device may not have computed anything yet."""
        if slot.round == self._round:
            raise RuntimeError(ACCUMULATED_AGAIN.format(name=slot.label))
        grad = slot.param.grad
        assert grad is not None
        recurring, mark = slot.recurring, slot.mark
        if recurring is not None and mark is not None and looks_alike_there(grad, slot):
            storage = grad.untyped_storage()
            if use_count(storage._cdata) == ALONE:
                mark.set(recurring.source)
                slot.starts, slot.round = recurring.starts, self._round
                self._again(recurring, grad.data_ptr(), (storage, mark))
                self._on_devices.append(recurring)
                self._written.append(grad)
                return
        self._try_to_submit(slot, grad)

    def _submit_member(self, slot: Slot) -> None:
        group, grad = slot.group, slot.param.grad
        assert group is not None and grad is not None
        if group.round == self._round:
            raise RuntimeError(ACCUMULATED_AGAIN.format(name=slot.label))
        place = ADAPTER.streams.place(grad)
        if place is not None and place is not CPU:
            group.note(slot, grad, partial(ADAPTER.streams.mark, place))
        if group.is_complete(slot):
            for event in group.elsewhere(slot):  # its gradients are described as standing on this one's stream
                ADAPTER.after(event, (grad,))
            self._submit_group(group)

    # --- all of them, at the end

    def wants_round(self) -> bool:
        """Whether ``.grad`` is not yet what it is to be before a step."""
        return self.open or self.touched or not self.reduced

    def synchronize(self) -> None:
        """Reduce what has not been; no effect where ``.grad`` is reduced already.

        Raises the first error of any gradient when all are over; and that again, until gradients are computed anew.
        """
        if self.failed is not None:
            raise self.failed.with_traceback(None)
        if self._seen:  # the first hook of a pass was interrupted
            self.incomplete = True
        if self.incomplete and not self.open:
            raise IncompleteGradients(INCOMPLETE)
        if self.wants_round():
            self.reduce()

    def reduce(self) -> None:
        """Run a round, or go on with the one that is open. Every member of the process set takes part."""
        self._send()
        self._complete()

    def _send(self) -> None:
        """Send what has not been sent in this round, zeros for what this rank has not computed."""
        if self.job.closed:
            self._rebind()
        if not self.active:
            return
        if not self.open:
            self._open_round()
        if self._entered:
            self._reconcile()
        self._entered = True
        self._submit_arrived()
        self._submit_rest()

    def _complete(self) -> None:
        """Wait for all of a round, and end it."""
        self._wait()
        self._place()
        self._end_round()

    def next_step(self) -> None:
        """The optimizer has stepped: the gradients to come are another step's."""
        self.rounds = 0
        self.reduced = self.touched = False
        self.passes_left = self.passes

    def discard(self) -> None:
        """The gradients are gone, whether they had been reduced or not."""
        if self.open and self.job.closed:
            self._forget()
        self.reduced = self.touched = False
        self.failed = None
        if not self.open:
            self._seen.clear()
            self.arrived.clear()
            self._before.clear()
            self._inner = False
            self.incomplete, self._partial = False, []
        self.passes_left = self.passes
        if not self._repeatable:
            for slot in self.slots:
                slot.holds_result = False
                slot.kept = None

    def _reconcile(self) -> None:
        """After an interrupt: what was about to be sent counts as sent if its allreduce was started, else it goes now."""
        waited = {id(recurring) for recurring in (*self._in_flight, *self._on_devices)}
        for group in self.groups:
            if group.round == self._round and group.attempt is not None and group.attempt.handle is None:
                self._submit_group(group)
        for slot in self.slots:
            if slot.round != self._round or slot.group is not None:
                continue
            grad = slot.param.grad
            attempt, result = self._attempts.get(slot), self._results.get(slot)
            if attempt is not None:
                if attempt.handle is None and not attempt.done and grad is not None:
                    self._try_to_submit(slot, grad)
                continue
            in_place = result is None or result.value is result.grad
            recurring = slot.recurring if in_place else slot.private
            if recurring is None or recurring.starts == slot.starts:
                self._results.pop(slot, None)
                self._try_to_submit(slot, self._nothing(slot) if grad is None else grad)
            elif id(recurring) not in waited:
                (self._in_flight if slot.mark is None else self._on_devices).append(recurring)
                if in_place and grad is not None:
                    self._written.append(grad)

    def _submit_arrived(self) -> None:
        """All at once what ``_submit`` does one by one, where nothing was sent while backward ran."""
        now = self._round
        batch = []
        written = []
        others = []
        for slot in self.arrived:
            if slot.round == now or slot.group is not None:
                continue
            grad = slot.param.grad
            if grad is None:
                continue  # taken away since: ``_submit_rest`` sees to it
            recurring = slot.recurring
            if recurring is not None and not slot.mark and looks_alike(grad, slot):
                storage = grad.untyped_storage()
                if use_count(storage._cdata) == ALONE:
                    slot.starts, slot.round = recurring.starts, now
                    batch.append((recurring, grad.data_ptr(), storage))
                    written.append(grad)
                    continue
            others.append((slot, grad))
        if batch:
            self._start_together(batch, written)
        for slot, grad in others:
            if slot.round != now:  # it may have arrived twice
                self._try_to_submit(slot, grad)

    def _start_together(self, batch: list[tuple[Any, int, Any]], written: list[torch.Tensor]) -> None:
        try:
            self.job.again_together(batch)
        except (DdlInternalError, ValueError) as error:
            self._failure = self._failure or error
        self._written += written
        self._in_flight += [recurring for recurring, _, _ in batch]  # one that was refused is idle, and not waited for

    def _submit_rest(self) -> None:
        now = self._round
        for group in self.groups:
            if group.round != now:
                if self.incomplete:
                    for i, slot in enumerate(slot for slot in group.slots if slot.param.requires_grad):
                        self._submit_end(slot, f"{group.name}[{i}]")
                    group.round = now
                    continue
                self._submit_group(group)
        for slot in self.slots:
            if slot.round == now or slot.group is not None or not slot.param.requires_grad:
                continue
            if self.incomplete:
                self._submit_end(slot, slot.name)
                continue
            if slot.holds_result:
                slot.before_gradient(None)
            grad = slot.param.grad
            self._try_to_submit(slot, self._nothing(slot) if grad is None else grad)

    def _submit_end(self, slot: Slot, name: str) -> None:
        """Tell the ranks that wait for this gradient that it will not come: they ask for something else, and so raise."""
        self._ended = True
        self._repeated.add(slot)
        name = self._on_wire(name)
        attempt = self._attempts.setdefault(slot, _Attempt())
        attempt.done = True
        zeros = torch.zeros_like(slot.param, requires_grad=False)
        if slot.sparse_dims and not self.reduction.sparse_as_dense and slot.group is None:
            if not attempt.go_on():
                with OPERATIONS.noting(attempt.handles):
                    OPERATIONS.allgather_async(
                        torch.empty((0, slot.sparse_dims), dtype=torch.int64, device=slot.param.device),
                        name=f"{name}.indices",
                        process_set=self.reduction.process_set,
                        job=self.job,
                        sparse=True,
                        by_host=self.reduction.sparse_by_host,
                    )
            attempt.handle = attempt.handles[0]
        if attempt.context is None:
            attempt.context = self._describe(zeros, name=name, part_of=ENDED)
        recurring = attempt.context
        if recurring.starts == 0:
            self._again(recurring, zeros.data_ptr(), (zeros, recurring.source.owner))
        under_way = self._in_flight if recurring.source.device is CPU else self._on_devices
        if not any(one is recurring for one in under_way):
            under_way.append(recurring)
        slot.round = self._round

    def _try_to_submit(self, slot: Slot, grad: torch.Tensor) -> None:
        """What this one gradient cannot do must not keep the others from the ranks that wait for them."""
        try:
            self._submit_other(slot, grad)
        except (DdlInternalError, ValueError) as error:
            slot.round = self._round
            self._failure = self._failure or error

    def _submit_other(self, slot: Slot, grad: torch.Tensor) -> None:
        """A first gradient, one that looks different, or one whose memory something else sees."""
        if slot.holds_result:  # nothing was added to it in this pass
            slot.before_gradient(None)
            grad = self._nothing(slot)
        if grad.is_sparse:
            if not self.reduction.sparse_as_dense:
                self._submit_sparse(slot, grad)
                return
            if not slot.sparse_dims:
                slot.forget_look()
            slot.sparse_dims = grad.sparse_dim()
            slot.param.grad = grad = grad.to_dense()
        if self.reduction.user_compressor is not None:
            self._submit_compressed(slot, grad, self.reduction.user_compressor)
            return
        slot.look_like(grad)
        storage = grad.untyped_storage()
        what = {"name": self._on_wire(slot.name)}
        if slot.sparse_dims:  # so that a rank which has never computed it is told
            what["part_of"] = SPARSE
        if is_alone(storage):
            if slot.recurring is None:
                slot.recurring = self._describe(grad, **what)
            recurring = slot.recurring
            self._written.append(grad)
            if slot.sparse_dims:
                self._results[slot] = _Result(grad, grad, True)
        else:
            value = torch.empty_like(grad)
            if slot.private is None:
                slot.private = self._describe(grad, output=value, **what)
            recurring = slot.private
            recurring.target.address, recurring.target.owner = value.data_ptr(), value
            # An accumulation into an older ``.grad`` would have raised its version.
            self._results[slot] = _Result(grad, value, grad._version == 0)
        if slot.mark is None:
            place = recurring.source.device
            slot.mark = None if place is CPU else ADAPTER.streams.mark(place)
            slot.submit = self._way_out(slot, grad)  # the parameter may have moved since it was given
        slot.starts, slot.round = recurring.starts, self._round
        if slot.mark is not None:
            slot.mark.set(recurring.source)
            self._again(recurring, grad.data_ptr(), (storage, slot.mark))
            self._on_devices.append(recurring)
            return
        self._again(recurring, grad.data_ptr(), storage)
        self._in_flight.append(recurring)

    def _submit_sparse(self, slot: Slot, grad: torch.Tensor) -> None:
        slot.sparse_dims = grad.sparse_dim()
        if self.rounds:  # a result that something was added to: what repeats in it is added up before it goes again
            grad = grad.coalesce()
        how = self.reduction
        attempt = self._attempt(slot)
        with OPERATIONS.noting(attempt.handles):
            attempt.handle = start_sparse(
                self.job,
                grad,
                self._on_wire(slot.name),
                how.op,
                how.process_set,
                how.sparse_by_host,
                tuple(attempt.go_on()),
            )

    def _submit_compressed(self, slot: Slot, grad: torch.Tensor, compressor: UserCompressor) -> None:
        attempt = self._attempt(slot)
        if not attempt.go_on():
            with torch.no_grad():
                packed, attempt.context = compressor.compress(grad)
            with OPERATIONS.noting(attempt.handles):
                self._reduce(packed.contiguous(), name=self._on_wire(slot.name))
        attempt.handle = Mapped(attempt.handles[0], partial(compressor.decompress, ctx=attempt.context))

    def _attempt(self, slot: Slot) -> _Attempt:
        """The one that was interrupted in this round, or a new one."""
        slot.round = self._round
        return self._attempts.setdefault(slot, _Attempt())

    def _submit_group(self, group: Group) -> None:
        """Send what a group has together. A sparse gradient goes as a dense one: a rank that has none cannot know."""
        if group.round != self._round and (group.attempt is None or group.attempt.handle is not None):
            group.attempt = _Attempt()
        group.round = self._round
        members = []
        for slot in group.slots:
            if not slot.param.requires_grad:
                continue
            if slot.holds_result:
                slot.before_gradient(None)
            grad = slot.param.grad if slot.param.grad is not None else self._nothing(slot)
            if grad.is_sparse:
                slot.sparse_dims = grad.sparse_dim()
                slot.param.grad = grad = grad.to_dense()
            members.append((slot, grad))
        if not members:
            return
        try:
            self._submit_members(group, members)
        except (DdlInternalError, ValueError) as error:
            self._failure = self._failure or error

    def _submit_members(self, group: Group, members: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        compressor = self.reduction.user_compressor
        attempt = group.attempt
        assert isinstance(attempt, _Attempt)
        if not attempt.go_on():
            grads = [grad for _, grad in members]
            outputs: list[torch.Tensor] | None = None
            parts: list[Callable[[Any], Any]]
            if compressor is None:
                outputs = [grad if is_alone(grad.untyped_storage()) else torch.empty_like(grad) for grad in grads]
                parts = [itemgetter(i) for i in range(len(grads))]
                packed = grads
            else:
                with torch.no_grad():
                    pairs = [compressor.compress(grad) for grad in grads]
                packed = [one.contiguous() for one, _ in pairs]
                parts = [partial(_part, i, compressor, ctx) for i, (_, ctx) in enumerate(pairs)]
            attempt.context = list(zip((slot for slot, _ in members), parts))
            with OPERATIONS.noting(attempt.handles):
                self._reduce_group(packed, outputs=outputs, name=self._on_wire(group.name))
        for slot, part in attempt.context:
            one = self._attempt(slot)
            one.handle = Mapped(attempt.handles[0], part)
        attempt.handle = attempt.handles[0]

    def _nothing(self, slot: Slot) -> torch.Tensor:
        """The gradient of a rank that has computed none: zeros, which the parameter keeps for the result."""
        param = slot.param
        self._absent.add(slot)
        if slot.sparse_dims and not self.reduction.sparse_as_dense and slot.group is None:
            shape, dense = param.shape, param.shape[slot.sparse_dims :]
            indices = torch.empty((slot.sparse_dims, 0), dtype=torch.int64, device=param.device)
            zeros = torch.sparse_coo_tensor(indices, param.new_empty((0, *dense)), shape, check_invariants=False)
        else:
            zeros = torch.zeros_like(param, requires_grad=False)
        param.grad = zeros
        return zeros

    # --- results

    def _wait(self) -> None:
        """Wait for all that was sent. What an operation raises is kept for the end; anything else is an interrupt."""
        in_flight = self._in_flight
        while in_flight:
            last = len(in_flight) - 1
            try:
                in_flight[last].wait()
            except (DdlInternalError, ValueError) as error:
                self._operation_failed(in_flight[last], error)  # which may send another
            del in_flight[last]
        if self._on_devices:
            self._follow()
        while (slot := next((slot for slot, one in self._attempts.items() if not one.done), None)) is not None:
            attempt = self._attempts[slot]
            if attempt.handle is not None:  # None: it was refused
                try:
                    self._note_result(slot, attempt.handle.wait())
                except (DdlInternalError, ValueError) as error:
                    if self._goes_otherwise(slot, attempt.handle, error):
                        continue
                    self._failure = self._failure or error
            attempt.done = True
        if self.incomplete:  # what other ranks were asked for in their place
            for slot, attempt in self._attempts.items():
                if attempt.handle is not None and slot in self._repeated:
                    attempt.handle.wait()

    def _operation_failed(self, recurring: Any, error: Exception) -> None:
        slot = next((one for one in self.slots if recurring is one.recurring or recurring is one.private), None)
        if slot is not None:
            if self._goes_otherwise(slot, None, error):
                return
            self._results.pop(slot, None)
        self._failure = self._failure or error

    def _goes_otherwise(self, slot: Slot, handle: Waitable | None, error: Exception) -> bool:
        """Whether ranks disagreed only since one that has never computed this gradient took it for a dense one.

        Then it knows better now, and it and the ranks whose gradients are sparse send once more.
        """
        if not isinstance(error, MismatchError) or slot in self._repeated or slot.group is not None or slot.agreed:
            return False
        grad = slot.param.grad
        if isinstance(handle, SparseHandle):
            self._repeated.add(slot)
            handle.send_values_again()
            return True
        if slot in self._absent and not slot.sparse_dims:
            slot.sparse_dims = 1  # as of all that torch makes
            grad = self._nothing(slot)
        elif grad is None or not slot.sparse_dims or not self.reduction.sparse_as_dense:
            return False
        self._repeated.add(slot)
        self._results.pop(slot, None)
        slot.forget_look()
        self._submit_other(slot, grad)
        return True

    def _note_result(self, slot: Slot, value: torch.Tensor) -> None:
        grad = slot.param.grad
        if grad is None:
            return  # taken away since
        fresh = grad.is_sparse or value.is_sparse or (grad._version == 0 and not is_alone(grad.untyped_storage()))
        if value is grad and slot.kept is None and not slot.sparse_dims:
            self._written.append(grad)
            return
        self._results[slot] = _Result(grad, value, fresh or slot.kept is not None)

    def _follow(self) -> None:
        """The current streams go on behind what is under way on devices; once for each event, of which a batch has one."""
        behind: dict[Any, Any] = {}  # event: one whose result stands behind it
        for recurring in reversed(self._on_devices):
            try:
                event = recurring.arrive()
                if event is not None:
                    behind.setdefault(event, recurring)
            except (DdlInternalError, ValueError) as error:
                self._operation_failed(recurring, error)
        for recurring in behind.values():
            try:
                recurring.wait()
            except (DdlInternalError, ValueError) as error:
                self._operation_failed(recurring, error)
        self._on_devices.clear()

    def _place(self) -> None:
        """Put results where they belong. What is done of it may be done twice: an interrupt may come in between."""
        results, placed = self._results, self._placed
        if not self._repeatable:
            for slot in self.slots:
                grad = slot.param.grad
                if slot.kept is not None and slot not in results and grad is not None:
                    results[slot] = _Result(grad, grad, True)
        for slot, (grad, value, fresh) in results.items():
            if slot in placed:
                continue
            if slot.private is not None:
                slot.private.target.owner = None
            if slot.sparse_dims and not value.is_sparse:
                value = value.to_sparse(slot.sparse_dims)  # as the optimizer of its parameter expects it
            if slot.kept is not None:
                value = slot.kept + value
            elif value is not grad and not fresh and not value.is_sparse:
                with torch.no_grad():  # others see this memory, and may expect the result in it
                    grad.copy_(value)
                value = grad
            # No signal's handler runs between these.
            slot.agreed = True
            slot.param.grad = value
            slot.kept = None
            placed.add(slot)

    def _end_round(self) -> None:
        # Where all gradients had been sent when the pass was interrupted, nothing is missing: other ranks go on with them.
        failure = self._failure or (IncompleteGradients(INCOMPLETE) if self._ended else None)
        if self._written:
            mark_written(self._written)
            self._written.clear()
        if not self._repeatable:
            for slot in self.slots:
                slot.holds_result = slot.round == self._round
        for group in self.groups:
            group.begin()
        self._results.clear()
        self._placed.clear()
        self._attempts.clear()
        self._absent.clear()
        self._repeated.clear()
        self._seen.clear()
        self.arrived.clear()
        if self.job.overlaps is not self._overlaps:  # a search has changed it
            self._overlaps = self.job.overlaps
            for slot in self.slots:
                slot.submit = self._way_out(slot, slot.param)
        # An interrupt before this line leaves the round open, with nothing left to do; between these there is none.
        self._pass = None
        self._failure = None
        self._entered = self.open = self.touched = self._ended = False
        self.incomplete = self.incomplete and failure is not None
        self.passes_left = self.passes
        self.rounds += 1
        self.reduced = failure is None
        self.failed = failure
        if failure is not None:
            raise failure

    def _rebind(self) -> None:
        """Go over to the job that is current now."""
        if self.open:
            self._forget()
            raise NotInitialized(LOST)
        self.bind()
        self.rounds = self._turn = 0

    def _forget(self) -> None:
        """The job of a round that is open has ended: its gradients will not be reduced."""
        self._in_flight.clear()
        self._on_devices.clear()
        self._written.clear()
        self._results.clear()
        self._placed.clear()
        self._attempts.clear()
        self._absent.clear()
        self._repeated.clear()
        self.arrived.clear()
        self._before.clear()
        self._seen.clear()
        self._failure = None
        self._entered = self.open = self._inner = self.incomplete = self._ended = False
        for group in self.groups:
            group.begin()


def _unhook(slot: Slot) -> None:
    for hook in (slot.first_hook, slot.hook, slot.tensor_hook):
        if hook is not None:
            hook.remove()
    slot.first_hook = slot.hook = slot.tensor_hook = None


def _part(index: int, compressor: UserCompressor, ctx: Any, results: Sequence[torch.Tensor]) -> torch.Tensor:
    whole: torch.Tensor = compressor.decompress(results[index], ctx)
    return whole
