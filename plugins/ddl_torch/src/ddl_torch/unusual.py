"""Sends gradients in the general way: those that are sent for the first time, or are unlike their parameter's last one.

Such a gradient has another type, layout or device than the last one, is sparse, belongs to a group, is compressed by a
class of the user, or has memory that something else uses. In this way, a rank also tells the others that it will not
send a gradient, and sends one again about which the ranks disagreed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ddl_torch.autograd import ADAPTER, OPERATIONS
from ddl_torch.binding import Binding
from ddl_torch.memory import is_alone
from ddl_torch.rounds import Attempt, ReducedGradient, Round
from ddl_torch.slots import GradientGroup, Reduction, Slot
from ddl_torch.sparse import SparseHandle, start_sparse
from ddl_torch.usual import has_lazy_views
from ddl_torch.weighting import Weights
from ddlcore.api import Mapped, UserCompressor, average_by
from ddlcore.contracts import PersistentRequest
from ddlcore.errors import DdlInternalError, MismatchError
from ddlcore.types import CPU

SPARSE = "a sparse gradient made dense"
ENDED = "a backward pass that did not come to its end"  # what the other ranks read in the table of a MismatchError


class UnusualSender:
    """The part that sends those gradients of one optimizer that are unlike their parameters' last ones.

    ``way_out`` is ``Sender.way_out``, and ``slots`` are those of the sender.
    """

    def __init__(
        self,
        reduction: Reduction,
        round: Round,
        slots: list[Slot],
        binding: Binding,
        weights: Weights | None,
        way_out: Callable[[Slot, torch.Tensor], Callable[[Slot], None] | None],
    ) -> None:
        self.reduction = reduction
        self.round = round
        self.slots = slots
        self.binding = binding
        self.weights = weights
        self.start: Callable[..., Any] = binding.job.start_request
        self._way_out = way_out

    def try_to_send(self, slot: Slot, grad: torch.Tensor) -> None:
        """Send one gradient. If the call fails, only record the error, which is raised at the end of the reduction.

        If the error were raised at once, the remaining gradients would not be sent, and other ranks wait for them.
        """
        try:
            self._send_anew(slot, grad)
        except (DdlInternalError, ValueError) as error:
            slot.round = self.round.number
            self.round.failure = self.round.failure or error

    def _send_anew(self, slot: Slot, grad: torch.Tensor) -> None:
        """Send the gradient ``grad`` of ``slot`` in the general way, which makes no assumption about the gradient.

        This way is used if ``grad`` is the first gradient of its parameter, if its type or layout differs from the last
        gradient's, or if something else uses its memory.
        """
        round = self.round
        if slot.holds_result:  # this pass has computed no gradient: ``.grad`` is still the last result
            slot.before_gradient(None)
            grad = self.zeros(slot)
        if grad.is_sparse:
            if not self.reduction.sparse_as_dense:
                self._send_sparse(slot, grad)
                return
            if not slot.sparse_dims:
                slot.forget_look()
            slot.sparse_dims = grad.sparse_dim()
            slot.param.grad = grad = grad.to_dense()
        if has_lazy_views([grad]):
            slot.param.grad = grad = grad.resolve_conj().resolve_neg()
        if self.reduction.user_compressor is not None:
            self._send_compressed(slot, grad, self.reduction.user_compressor)
            return
        slot.look_like(grad)
        storage = grad.untyped_storage()
        what = {"name": round.name_of(slot.name), "part_of": self._part_of()}
        if slot.sparse_dims:  # tells a rank that has never computed this gradient that it is sparse
            what["part_of"] = SPARSE
        if is_alone(storage):
            if slot.request is None:
                slot.request = self.binding.persistent_allreduce(grad, **what)
            request = slot.request
            round.written.append(grad)
            if slot.sparse_dims:
                round.results[slot] = ReducedGradient(grad, grad, True)
        else:
            value = torch.empty_like(grad)
            if slot.private is None:
                slot.private = self.binding.persistent_allreduce(grad, output=value, **what)
            request = slot.private
            request.set_target(value.data_ptr(), value)
            # Version 0 means that autograd has made this tensor in this pass: accumulating into an older ``.grad``
            # would have raised the version.
            round.results[slot] = ReducedGradient(grad, value, grad._version == 0)
        if slot.mark is None:
            place = request.source.device
            slot.mark = None if place is CPU else ADAPTER.streams.mark(place)
            slot.submit = self._way_out(slot, grad)  # the parameter may have moved to another device since ``add``
        slot.starts, slot.round = request.starts, round.number
        if slot.mark is not None:
            slot.mark.set(request)
            self.start(request, grad.data_ptr(), (storage, slot.mark))
            round.on_devices.append(request)
            return
        self.start(request, grad.data_ptr(), storage)
        round.in_flight.append(request)

    def _send_sparse(self, slot: Slot, grad: torch.Tensor) -> None:
        slot.sparse_dims = grad.sparse_dim()
        if self.round.of_step:  # ``.grad`` is an earlier result plus new values: combine indices that occur twice
            grad = grad.coalesce()
        how = self.reduction
        attempt = self.round.attempt(slot)
        with OPERATIONS.noting(attempt.handles):
            attempt.handle = start_sparse(
                self.binding.job,
                grad,
                self.round.name_of(slot.name),
                self.binding.op,
                how.process_set,
                how.stage_sparse_on_host,
                tuple(attempt.go_on()),
            )

    def _send_compressed(self, slot: Slot, grad: torch.Tensor, compressor: UserCompressor) -> None:
        attempt = self.round.attempt(slot)
        if not attempt.go_on():
            with torch.no_grad():
                packed, attempt.context = compressor.compress(grad)
            with OPERATIONS.noting(attempt.handles):
                self.binding.allreduce(packed.contiguous(), name=self.round.name_of(slot.name), part_of=self._part_of())
        attempt.handle = Mapped(attempt.handles[0], partial(compressor.decompress, ctx=attempt.context))

    def send_group(self, group: GradientGroup) -> None:
        """Send the gradients of a group together, and zeros for the gradients that this rank has not computed.

        Sparse gradients are made dense, because a rank that has not computed a gradient cannot know that the gradient
        is sparse.
        """
        now = self.round.number
        if group.round != now and (group.attempt is None or group.attempt.handle is not None):
            group.attempt = Attempt()
        group.round = now
        members = []
        for slot in group.slots:
            if not slot.param.requires_grad:
                continue
            if slot.holds_result:
                slot.before_gradient(None)
            grad = slot.param.grad if slot.param.grad is not None else self.zeros(slot)
            if grad.is_sparse:
                slot.sparse_dims = grad.sparse_dim()
                slot.param.grad = grad = grad.to_dense()
            if has_lazy_views([grad]):
                slot.param.grad = grad = grad.resolve_conj().resolve_neg()
            members.append((slot, grad))
        if not members:
            return
        try:
            self._send_members(group, members)
        except (DdlInternalError, ValueError) as error:
            self.round.failure = self.round.failure or error

    def _send_members(self, group: GradientGroup, members: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        compressor = self.reduction.user_compressor
        attempt = group.attempt
        assert isinstance(attempt, Attempt)
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
                name = self.round.name_of(group.name)
                self.binding.grouped_allreduce(packed, outputs=outputs, name=name, part_of=self._part_of())
        for slot, part in attempt.context:
            one = self.round.attempt(slot)
            one.handle = Mapped(attempt.handles[0], part)
        attempt.handle = attempt.handles[0]

    def zeros(self, slot: Slot) -> torch.Tensor:
        """Set ``.grad`` of a parameter to zeros, and return these zeros.

        ``slot`` is the record of the parameter's gradient. This method is for a parameter whose gradient this rank has
        not computed.
        """
        param = slot.param
        self.round.absent.add(slot)
        if slot.sparse_dims and not self.reduction.sparse_as_dense and slot.group is None:
            shape, dense = param.shape, param.shape[slot.sparse_dims :]
            indices = torch.empty((slot.sparse_dims, 0), dtype=torch.int64, device=param.device)
            zeros = torch.sparse_coo_tensor(indices, param.new_empty((0, *dense)), shape, check_invariants=False)
        else:
            zeros = torch.zeros_like(param, requires_grad=False)
        param.grad = zeros
        return zeros

    def _part_of(self) -> str:
        """Return what tells the ranks apart that average in different ways, for the messages."""
        if self.weights is None:
            return ""
        return average_by(share=bool(self.weights.by_share))

    # --- what is not sent, and what is sent again

    def send_end(self, slot: Slot, name: str) -> None:
        """Inform the ranks that wait for the gradient of ``slot`` that this rank will not send it.

        To do so, this rank starts an allreduce of the same ``name`` with a description that differs from that of the
        other ranks. Therefore the allreduce fails with a MismatchError on all ranks.
        """
        round = self.round
        round.ended = True
        if slot.sparse_dims and not self.reduction.sparse_as_dense and slot.group is None:
            self._answer_indices(slot)
        if slot not in round.ends:
            zeros = torch.zeros_like(slot.param, requires_grad=False)
            round.ends[slot] = self.binding.persistent_allreduce(zeros, name=round.name_of(name), part_of=ENDED), zeros
        request, zeros = round.ends[slot]
        if request.starts == 0:
            self.start(request, zeros.data_ptr(), (zeros, request.source.owner))
        under_way = round.in_flight if request.source.device is CPU else round.on_devices
        if not any(one is request for one in under_way):
            under_way.append(request)
        slot.round = round.number

    def _answer_indices(self, slot: Slot) -> None:
        """Take part in the allgather of a sparse gradient's indices, without any rows of this rank.

        Other ranks wait for this rank in that allgather.
        """
        answer = self.round.answers.setdefault(slot, Attempt())
        if answer.go_on():
            return
        with OPERATIONS.noting(answer.handles):
            OPERATIONS.allgather_async(
                torch.empty((0, slot.sparse_dims), dtype=torch.int64, device=slot.param.device),
                name=f"{self.round.name_of(slot.name)}.indices",
                process_set=self.reduction.process_set,
                job=self.binding.job,
                sparse=True,
                stage_on_host=self.reduction.stage_sparse_on_host,
            )

    def slot_of(self, request: PersistentRequest) -> Slot | None:
        """Return the slot whose gradient ``request`` sends, or None if that slot has meanwhile replaced the request.

        A slot is the record of one parameter's gradient.
        """
        for slot in self.slots:
            if request is slot.request or request is slot.private or request is self.round.ends.get(slot, (None,))[0]:
                return slot
        return None

    def send_otherwise(self, slot: Slot, failed: Any, error: Exception) -> bool:
        """Send a gradient again if its reduction failed because ranks disagreed on whether the gradient is sparse.

        Returns whether the gradient was sent again. A rank that has never computed this gradient sends zeros as for a
        dense gradient. The MismatchError informs that rank that the gradient is sparse on other ranks. Then that rank
        and the other ranks send the gradient again. ``failed`` is the request or handle whose wait raised ``error``.
        """
        round = self.round
        if not isinstance(error, MismatchError) or slot.group is not None:
            return False
        if ENDED in error.parts:  # the rank whose backward did not end would not send it again
            if isinstance(failed, SparseHandle):
                round.answers[slot] = round.attempts[slot]  # its indices are still in flight
            elif "allgather" in error.kinds:
                slot.sparse_dims = slot.sparse_dims or 1  # see below
                self._answer_indices(slot)
            return False
        if slot in round.repeated or slot.agreed:
            return False
        if isinstance(failed, SparseHandle):
            failed.send_values_again()
            round.repeated.add(slot)
            return True
        grad = slot.param.grad
        unknown = slot in round.absent and not slot.sparse_dims
        if not unknown and (grad is None or not slot.sparse_dims or not self.reduction.sparse_as_dense):
            return False
        # An interrupt may come at any call. If it comes before the plain assignments below, the next wait raises the
        # same error, and this method runs again. If it comes after them, ``Sender._resume`` finds that the gradient has
        # no request, and sends it.
        round.replaced.append(failed)
        if unknown:
            slot.sparse_dims = 1  # all sparse gradients that torch makes have one sparse dimension
        slot.request = slot.private = None
        slot.others = {}
        round.results.pop(slot, None)
        round.repeated.add(slot)
        self._send_anew(slot, self.zeros(slot) if unknown or grad is None else grad)
        return True


def _part(index: int, compressor: UserCompressor, ctx: Any, results: Sequence[torch.Tensor]) -> torch.Tensor:
    whole: torch.Tensor = compressor.decompress(results[index], ctx)
    return whole
