"""Sends each gradient off the moment it stands, and brings all of them home; knows no optimizer.

The path of one gradient: autograd calls ``Slot.on_gradient``, the slot's last pass submits it, in place
on ``param.grad``, and ``Reducer.synchronize`` waits. What a rank has not computed it submits as zeros there.
Where nothing is reduced while the step computes (``job.overlaps``), a complete gradient only stands by, and
all go off together in ``synchronize``: half the work for each. One on a device always goes off at once, with
a mark of when it stands there: no host waits for a device, neither here nor in ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ddl_torch.autograd import ADAPTER, OPERATIONS
from ddl_torch.slots import Group, Reduction, Slot, looks_alike, looks_alike_there
from ddl_torch.sparse import start_sparse
from ddlcore.api import Mapped, UserCompressor, Waitable, current_job, global_process_set
from ddlcore.errors import NotInitialized
from ddlcore.types import CPU

__all__ = ["Reducer"]

LOST = (
    "ddl was shut down between backward() and step(), so the gradients of this step are lost; "
    "call optimizer.zero_grad() and compute them again"
)


class Reducer:
    """All gradients of one optimizer. Used by the thread that trains; hooks may come from autograd's threads.

    It holds the job that was current when it was made. After ``shutdown()`` and another ``init()`` it goes
    over to the new one at the next step, if nothing was under way.
    """

    def __init__(self, reduction: Reduction, passes: int) -> None:
        self.reduction = reduction
        self.passes = passes
        self.slots: list[Slot] = []
        self.groups: list[Group] = []
        self.flying: list[tuple[Waitable, Slot, torch.Tensor]] = []
        self.aloft: list[Any] = []  # recurring allreduces under way
        self.afar: list[Any] = []  # the same, on devices
        self.standing_by: list[Slot] = []  # whose gradients are complete, and go off in ``synchronize``
        self.synchronized = False  # since the last step
        self.bind()

    def bind(self) -> None:
        """Belongs to the current job from now on. Raises NotInitialized where there is none."""
        self.job = current_job()
        process_set = self.reduction.process_set
        members = range(self.job.size) if process_set is global_process_set else process_set.ranks
        if process_set.process_set_id is None:
            raise ValueError(f"{process_set} is not registered; pass it to init() or add_process_set() first")
        self.active = self.job.rank in members and len(members) > 1
        self._again = self.job.again
        self._overlaps = self.job.overlaps
        for slot in self.slots:
            slot.recurring = None
            if slot.group is None:
                slot.submit = self._way_out(slot.param)
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
        if self.active:
            self._name_devices(self.slots)
            for slot in self.slots:
                self._watch(slot)
        else:
            self.standing_by.clear()  # nobody waits for them
            self.release()

    # --- parameters

    def add(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[Slot]:
        """Watches these parameters too."""
        added = [Slot(param, "gradient." + name, self.passes, self._way_out(param)) for name, param in named]
        self._name_devices(added)
        for slot in added:
            self._watch(slot)
        self.slots += added
        return added

    def add_group(self, slots: Sequence[Slot]) -> None:
        """Sends these gradients off together from now on."""
        group = Group(slots)
        for slot in slots:
            slot.group = group
            slot.submit = self._submit_member
        self.groups.append(group)

    def _name_devices(self, slots: Sequence[Slot]) -> None:
        """Gives devices their numbers in the order of the parameters: hooks run on a thread for each, in no order."""
        for place in dict.fromkeys(ADAPTER.streams.place(slot.param) for slot in slots):
            if self.active and place is not None and place is not CPU:
                self.job.device_label(place)

    def _way_out(self, param: torch.Tensor) -> Callable[[Slot], None]:
        """What a complete gradient of ``param`` does: it goes off at once, or stands by."""
        if ADAPTER.streams.place(param) is not CPU:
            return self._submit_there
        return self._submit if self.job.overlaps else self.standing_by.append

    def _watch(self, slot: Slot) -> None:
        param = slot.param
        if not self.active or slot.hook is not None or not param.is_leaf:
            return
        if not (param.is_floating_point() or param.is_complex()):
            return  # never has a gradient
        required = param.requires_grad
        if not required:  # torch refuses the hook, which must be there should the parameter be thawed
            param.requires_grad_(True)
        slot.hook = param.register_post_accumulate_grad_hook(slot.on_gradient)
        if not required:
            param.requires_grad_(False)

    def release(self) -> None:
        """Takes the hooks off: parameters, hooks and slots would keep each other alive."""
        for slot in self.slots:
            if slot.hook is not None:
                slot.hook.remove()
                slot.hook = None

    # --- on the way out

    def _submit(self, slot: Slot) -> None:
        """Runs once a parameter and step: a gradient that looks like the last one costs as little as can be."""
        grad = slot.param.grad
        assert grad is not None
        if slot.recurring is not None and looks_alike(grad, slot) and not self.job.closed:
            self._again(slot.recurring, grad.data_ptr(), grad)
            self.aloft.append(slot.recurring)
            return
        self._submit_other(slot, grad)

    def _submit_there(self, slot: Slot) -> None:
        """``_submit`` of a gradient on a device, of which the device may not have computed anything yet."""
        grad = slot.param.grad
        assert grad is not None
        recurring, mark = slot.recurring, slot.mark
        if recurring is not None and mark is not None and looks_alike_there(grad, slot) and not self.job.closed:
            mark.set(recurring.source)
            self._again(recurring, grad.data_ptr(), (grad, mark))
            self.afar.append(recurring)
            return
        self._submit_other(slot, grad)

    def _submit_standing_by(self) -> None:
        """All at once what ``_submit`` does one by one."""
        slots = self.standing_by[:]
        self.standing_by.clear()  # the list stays: slots have its ``append``
        started = []
        others = []
        for slot in slots:
            grad = slot.param.grad
            if grad is None:  # taken away since
                slot.left = 1
            elif slot.recurring is not None and looks_alike(grad, slot):
                started.append((slot.recurring, grad.data_ptr(), grad))
            else:
                others.append((slot, grad))
        self.aloft += [recurring for recurring, _, _ in started]  # one that is refused is idle, and not waited for
        self.job.again_together(started)
        for slot, grad in others:
            self._submit_other(slot, grad)

    def _submit_other(self, slot: Slot, grad: torch.Tensor) -> None:
        """A first gradient, or one that looks different."""
        if self.job.closed and not self._rebind():
            return
        if grad.is_sparse:
            dense = self._densified(slot, grad)
            if dense is None:
                return
            grad = dense
        if self.reduction.user_compressor is not None:
            self._submit_compressed(slot, grad, self.reduction.user_compressor)
            return
        slot.recurring = recurring = self._describe(grad, name=slot.name)
        slot.dtype, slot.count, slot.shape = grad.dtype, grad.numel(), grad.shape
        slot.strides = None if grad.is_contiguous() else grad.stride()
        place = recurring.source.device
        if slot.mark is None or slot.device != grad.device:
            slot.mark = None if place is CPU else ADAPTER.streams.mark(place)
            slot.device = grad.device
            if slot.group is None:
                slot.submit = self._way_out(grad)  # the parameter may have moved since it was given
        if slot.mark is not None:
            slot.mark.set(recurring.source)
            self._again(recurring, grad.data_ptr(), (grad, slot.mark))
            self.afar.append(recurring)
            return
        self._again(recurring, grad.data_ptr(), grad)
        self.aloft.append(recurring)

    def _submit_compressed(self, slot: Slot, grad: torch.Tensor, compressor: UserCompressor) -> None:
        with torch.no_grad():
            packed, ctx = compressor.compress(grad)
        packed = packed.contiguous()
        handle = self._reduce(packed, name=slot.name)
        self.flying.append((Mapped(handle, partial(compressor.decompress, ctx=ctx)), slot, grad))

    def _densified(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        """A sparse gradient made dense where that is wanted; else None, and it is on its way by itself."""
        if self.reduction.sparse_as_dense:
            slot.param.grad = dense = grad.to_dense()
            return dense
        slot.sparse_dims = grad.sparse_dim()
        how = self.reduction
        handle = start_sparse(self.job, grad, slot.name, how.op, how.process_set, how.sparse_by_host)
        self.flying.append((handle, slot, grad))
        return None

    def _submit_member(self, slot: Slot) -> None:
        group, grad = slot.group, slot.param.grad
        assert group is not None and grad is not None
        place = ADAPTER.streams.place(grad)
        if place is not None and place is not CPU:
            group.note(slot, grad, partial(ADAPTER.streams.mark, place))
        if group.is_complete():
            for event in group.elsewhere(slot):  # its gradients are described as standing on this one's stream
                ADAPTER.after(event, (grad,))
            self._submit_group(group)

    def _submit_group(self, group: Group) -> None:
        if self.job.closed and not self._rebind():
            return
        group.sent = True
        members = []
        for slot in group.slots:
            if not slot.param.requires_grad:
                continue
            slot.left = 0
            grad = slot.param.grad if slot.param.grad is not None else self._nothing(slot)
            dense = self._densified(slot, grad) if grad.is_sparse else grad
            if dense is not None:
                members.append((slot, dense))
        if members:
            self._submit_dense(group.name, members)

    def _submit_dense(self, name: str, members: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        compressor = self.reduction.user_compressor
        grads = [grad for _, grad in members]
        parts: list[Callable[[Any], Any]]
        if compressor is None:
            handle = self._reduce_group(grads, outputs=grads, name=name)
            parts = [itemgetter(i) for i in range(len(grads))]
        else:
            with torch.no_grad():
                pairs = [compressor.compress(grad) for grad in grads]
            handle = self._reduce_group([packed.contiguous() for packed, _ in pairs], name=name)
            parts = [partial(_part, i, compressor, ctx) for i, (_, ctx) in enumerate(pairs)]
        self.flying += [(Mapped(handle, part), slot, grad) for part, (slot, grad) in zip(parts, members, strict=True)]

    def _nothing(self, slot: Slot) -> torch.Tensor:
        """The gradient of a rank that has computed none: zeros, which the parameter keeps for the result."""
        param = slot.param
        if slot.sparse_dims:
            shape, dense = param.shape, param.shape[slot.sparse_dims :]
            indices = torch.empty((slot.sparse_dims, 0), dtype=torch.int64, device=param.device)
            zeros = torch.sparse_coo_tensor(indices, param.new_empty((0, *dense)), shape, check_invariants=False)
        else:
            zeros = torch.zeros_like(param, requires_grad=False)
        param.grad = zeros
        return zeros

    # --- on the way home

    def is_under_way(self) -> bool:
        """Whether a complete gradient waits to come home."""
        return bool(self.flying or self.aloft or self.afar or self.standing_by) or (
            bool(self.groups) and any(slot.left == 0 for slot in self.slots)
        )

    def has_begun(self) -> bool:
        """Whether a gradient has come since the last ``synchronize``."""
        return bool(self.flying or self.aloft or self.afar or self.standing_by) or any(
            slot.left != self.passes for slot in self.slots
        )

    def synchronize(self) -> None:
        """Submits what this rank has not computed, and returns when every gradient is reduced.

        Every member calls it once a step. Raises the first error of any of them, when all are over.
        """
        if self.job.closed:
            self._rebind()
        if self.active:
            self._submit_standing_by()
            self._submit_rest()
            self._collect()
            self._again = self.job.again  # another function while a timeline is recorded
            if self.job.overlaps is not self._overlaps:
                self._turn()
        self.synchronized = True

    def _turn(self) -> None:
        """A search has changed whether gradients travel while the step computes."""
        self._overlaps = self.job.overlaps
        for slot in self.slots:
            if slot.group is None:
                slot.submit = self._way_out(slot.param)

    def _submit_rest(self) -> None:
        for group in self.groups:
            if not group.sent:
                self._submit_group(group)
        for slot in self.slots:
            if slot.left == 0 or slot.group is not None or not slot.param.requires_grad:
                continue
            slot.left = 0
            if slot.param.grad is None:
                self._nothing(slot)
            if slot.mark is None:
                self._submit(slot)
            else:
                self._submit_there(slot)

    def _collect(self) -> None:
        flying, self.flying = self.flying, []
        aloft, self.aloft = self.aloft, []
        self.rewind()
        failure: Exception | None = None
        try:
            while aloft:
                try:
                    aloft[-1].wait()
                except Exception as error:
                    failure = failure or error
                aloft.pop()
            if self.afar:
                failure = self._follow() or failure
        except BaseException:  # Ctrl-C: the rest is still under way, and waited for the next time
            self.aloft, self.flying = aloft, flying
            raise
        for handle, slot, grad in flying:
            try:
                result = handle.wait()
            except Exception as error:  # the others are in place in memory that is the user's again after this
                failure = failure or error
                continue
            if result is not grad:
                _place(result, slot, grad)
        if failure is not None:
            raise failure

    def _follow(self) -> Exception | None:
        """The current streams go on behind what is under way on devices; once for each event, of which a batch has one."""
        failure: Exception | None = None
        behind: dict[Any, Any] = {}  # event: one whose result stands behind it
        for recurring in reversed(self.afar):
            try:
                event = recurring.arrive()
                if event is not None:
                    behind.setdefault(event, recurring)
            except Exception as error:
                failure = failure or error
        for recurring in behind.values():
            try:
                recurring.wait()
            except Exception as error:
                failure = failure or error
        self.afar.clear()
        return failure

    def rewind(self) -> None:
        """All parameters await a whole round of backward passes again."""
        for slot in self.slots:
            slot.left = self.passes
        for group in self.groups:
            group.begin()

    def _rebind(self) -> bool:
        """Goes over to the job that is current now; whether that one needs gradients sent."""
        if self.flying or self.aloft or self.afar:
            self._forget()
            raise NotInitialized(LOST)
        try:
            self.bind()
        except NotInitialized:
            if not self.standing_by:
                raise
            self._forget()
            raise NotInitialized(LOST) from None
        return self.active

    def _forget(self) -> None:
        """Gradients that are complete will not be reduced."""
        self.flying, self.aloft, self.afar = [], [], []
        self.standing_by.clear()
        self.rewind()


def _part(index: int, compressor: UserCompressor, ctx: Any, results: Sequence[torch.Tensor]) -> torch.Tensor:
    whole: torch.Tensor = compressor.decompress(results[index], ctx)
    return whole


def _place(result: torch.Tensor, slot: Slot, grad: torch.Tensor) -> None:
    """Puts a result that was not reduced in place where it belongs."""
    if result.is_sparse:
        slot.param.grad = result
    else:
        with torch.no_grad():
            grad.copy_(result)
