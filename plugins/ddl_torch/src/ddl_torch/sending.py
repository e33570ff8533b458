"""Sends each gradient of a round, in the fastest way that its memory, its layout and its device allow.

A round is one reduction of all gradients. If a gradient has the type, layout and device of the same parameter's last
gradient, and nothing else uses its memory, its persistent request is started, which reduces the gradient in place.
Otherwise a new request is made for the gradient, or the gradient is reduced into separate memory. A sparse gradient is
gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from ddl_torch.autograd import ADAPTER, OPERATIONS
from ddl_torch.binding import Binding, bind
from ddl_torch.memory import ALONE, is_alone, pin_size, use_count
from ddl_torch.rounds import Attempt, Result, Round
from ddl_torch.slots import Group, Reduction, Slot, looks_alike, looks_alike_there
from ddl_torch.sparse import SparseHandle, start_sparse
from ddl_torch.usual import UsualGradients, address_of, address_of_storage, storage_of
from ddl_torch.weighting import OF_A_SUM, Weights
from ddlcore.api import Mapped, UserCompressor, average_by
from ddlcore.contracts import PersistentRequest, RequestStart
from ddlcore.errors import DdlInternalError, MismatchError
from ddlcore.types import CPU

SPARSE = "a sparse gradient made dense"
ENDED = "a backward pass that did not come to its end"  # what the other ranks read in the table of a MismatchError
ACCUMULATED_AGAIN = (
    "the gradient of {name!r} was computed a second time within one backward(), while its reduction was under way: "
    "re-entrant checkpointing of a shared parameter does that. Use torch.utils.checkpoint(..., use_reentrant=False), "
    "or DDL_OVERLAP=off, which reduces gradients at the end of backward()"
)


class Sender:
    """The part that sends the gradients of one optimizer: from hooks while backward runs, or at the end of the pass."""

    def __init__(self, reduction: Reduction, round: Round, slots: list[Slot], groups: list[Group]) -> None:
        self.reduction = reduction
        self.round = round
        self.slots = slots
        self.groups = groups
        self.binding: Binding = bind(reduction)
        self.eager = False  # whether any gradient is sent while backward runs
        self._start: Callable[..., Any] = self.binding.job.start_request
        self._usual = UsualGradients([])
        self.weights: Weights | None = None  # of an average with weights
        self.apart = False  # whether passes compute their gradients apart from earlier results and sums
        self.weight_sum: torch.Tensor | None = None  # see ``Weights.fill``
        self._weight_requests: dict[int, PersistentRequest] = {}  # by the round of a step

    def begin_round(self) -> None:
        """Open the next round, which is one reduction of all gradients."""
        self._start = self.binding.job.start_request  # of another job after shutdown() and init()
        self.round.begin(self.slots)

    def way_out(self, slot: Slot, tensor: torch.Tensor) -> Callable[[Slot], None] | None:
        """Return the function that sends the gradient of ``slot`` while backward runs.

        Returns None if the gradient is sent at the end of the backward pass. The choice depends on whether ``tensor``,
        which is the parameter or its gradient, is in host memory or on a device. This method sets ``eager`` to True if
        gradients are sent while backward runs.
        """
        on_device = ADAPTER.streams.place(tensor) is not CPU
        overlaps = self.binding.job.overlaps
        self.eager = self.eager or on_device or overlaps
        if not (on_device or overlaps):
            return None
        way = self._send_member if slot.group is not None else self._send_on_device if on_device else self._send
        return way if self.weights is None else partial(self._weigh_and_send, self.weights, way)

    # --- weights

    def _weigh_and_send(self, weights: Weights, way: Callable[[Slot], None], slot: Slot) -> None:
        weights.weigh(slot)
        way(slot)

    def _weigh_all(self, weights: Weights) -> None:
        """Weigh the gradients that were not weighed while backward ran, and send the sum of this rank's weights."""
        weights.weigh_all(self.slots, together=not (self.eager or self.apart))
        if weights.counts:
            self._send_weight(weights)

    def _send_weight(self, weights: Weights) -> None:
        round = self.round
        request = self._weight_requests.get(round.turn)
        if request is None:
            if self.weight_sum is None:  # of the gradients' type, so that they can share a bucket
                single = all(slot.param.dtype is torch.float32 for slot in self.slots)
                self.weight_sum = torch.zeros(OF_A_SUM, dtype=torch.float32 if single else torch.float64)
            request = self._weight_requests[round.turn] = OPERATIONS.persistent_allreduce(
                self.weight_sum,
                name=round.name_of(self.binding.prefix.replace("gradient", "weight of gradient", 1)),
                op=self.binding.op,
                process_set=self.reduction.process_set,
                job=self.binding.job,
            )
        assert self.weight_sum is not None
        if weights.sent_in != weights.turn:
            weights.sent, weights.sent_in = request.starts, weights.turn
        if request.starts == weights.sent:  # otherwise an interrupt has come after the request was started
            weights.fill(self.weight_sum)
            try:
                self._start(request, self.weight_sum.data_ptr(), self.weight_sum)
            except (DdlInternalError, ValueError) as error:
                round.failure = round.failure or error
        if not any(one is request for one in round.in_flight):
            round.in_flight.append(request)

    def forget_weight_sum(self) -> None:
        """Drop the sum of the weights and its requests, because another job begins."""
        self._weight_requests.clear()
        self.weight_sum = None  # what the last job left may still write to its memory

    def _part_of(self) -> str:
        """Return what tells the ranks apart that average in different ways, for the messages."""
        if self.weights is None:
            return ""
        return average_by(share=bool(self.weights.by_share))

    # --- one gradient, while backward runs

    def _send(self, slot: Slot) -> None:
        """Send the gradient of ``slot``, which is in host memory and has just been computed.

        This method runs once for each parameter and step. So it does as little as possible in the usual case, in which
        the gradient has the type and layout of the last gradient.
        """
        round = self.round
        if slot.round == round.number:
            raise RuntimeError(ACCUMULATED_AGAIN.format(name=slot.label))
        grad = slot.param.grad
        assert grad is not None
        request = slot.request
        if request is not None and looks_alike(grad, slot):
            storage = grad.untyped_storage()
            if use_count(storage._cdata) == ALONE:
                pin_size(grad)
                slot.starts, slot.round = request.starts, round.number
                self._start(request, grad.data_ptr(), storage)
                round.in_flight.append(request)
                round.written.append(grad)
                return
        self._try_to_send(slot, grad)
        if not grad.is_sparse:
            pin_size(grad)

    def _send_on_device(self, slot: Slot) -> None:
        """Send the gradient of ``slot``, which is on a device, as soon as its computation is queued.

        The device may not have computed the gradient yet. So an event on the device's stream records when the gradient
        is ready.
        """
        round = self.round
        if slot.round == round.number:
            raise RuntimeError(ACCUMULATED_AGAIN.format(name=slot.label))
        grad = slot.param.grad
        assert grad is not None
        request, mark = slot.request, slot.mark
        if request is not None and mark is not None and looks_alike_there(grad, slot):
            storage = grad.untyped_storage()
            if use_count(storage._cdata) == ALONE:
                mark.set(request)
                slot.starts, slot.round = request.starts, round.number
                self._start(request, grad.data_ptr(), (storage, mark))
                round.on_devices.append(request)
                round.written.append(grad)
                return
        self._try_to_send(slot, grad)

    def _send_member(self, slot: Slot) -> None:
        """Record that the gradient of ``slot`` is complete, and send its group if no other gradient is missing."""
        group, grad = slot.group, slot.param.grad
        assert group is not None and grad is not None
        if group.round == self.round.number:
            raise RuntimeError(ACCUMULATED_AGAIN.format(name=slot.label))
        place = ADAPTER.streams.place(grad)
        if place is not None and place is not CPU:
            group.note(slot, grad, partial(ADAPTER.streams.mark, place))
        if group.is_complete(slot):
            for event in group.events_of_others(slot):  # the group is marked as ready on this gradient's stream only
                ADAPTER.after(event, (grad,))
            self._send_group(group)

    # --- all of them, at the end of backward

    def send_all(self, arrived: Sequence[Slot], incomplete: bool) -> None:
        """Send all gradients that were not sent in this round, and zeros for those that this rank has not computed.

        A round is one reduction of all gradients. ``arrived``: the slots (records of gradients) whose gradients the
        backward pass has computed. ``incomplete``: whether backward was interrupted or has failed. If so, this rank
        sends no zeros, but informs the other ranks that it will not send the missing gradients.
        """
        round = self.round
        resumed = round.entered
        if resumed:
            self._resume()
        round.entered = True
        if self.weights is not None:
            self._weigh_all(self.weights)
        if resumed or self.eager or not self._send_as_usual(arrived):
            self._send_arrived(arrived)
        self._send_missing(incomplete)

    def _resume(self) -> None:
        """Complete the records of a round (reduction of all gradients) whose sending was interrupted.

        If a gradient was about to be sent, the start count of its request shows whether it was sent. If it was not
        sent, this method sends it.
        """
        # Each gradient is sent in three steps: store the round's number in ``slot.round``, start the request, append
        # the request to a list of requests to wait for. An interrupt may come before or after each step. ``slot.round``
        # alone does not tell whether the request was started, so ``slot.starts`` holds the request's counter from
        # before the start. If the counter is unchanged, nothing was started, and starting again is safe. If it has
        # changed, peers may read the gradient already: it must not be sent a second time, only be waited for.
        round = self.round
        waited = {id(request) for request in (*round.in_flight, *round.on_devices)}
        for group in self.groups:
            if group.round == round.number and group.attempt is not None and group.attempt.handle is None:
                self._send_group(group)
        for slot in self.slots:
            if slot.round != round.number or slot.group is not None or slot in round.ends:
                continue
            grad = slot.param.grad
            attempt, result = round.attempts.get(slot), round.results.get(slot)
            if attempt is not None:
                if attempt.handle is None and not attempt.done and grad is not None:
                    self._try_to_send(slot, grad)
                continue
            in_place = result is None or result.value is result.grad
            request = slot.request if in_place else slot.private
            if request is None or request.starts == slot.starts:
                round.results.pop(slot, None)
                self._try_to_send(slot, self._zeros(slot) if grad is None else grad)
            elif id(request) not in waited:
                (round.in_flight if slot.mark is None else round.on_devices).append(request)
                if in_place and grad is not None:
                    round.written.append(grad)

    def _send_arrived(self, arrived: Sequence[Slot]) -> None:
        """Send all gradients that have arrived and were not sent while backward ran.

        Unlike ``_send``, this method starts all persistent requests in one call.
        """
        round = self.round
        now = round.number
        slots = [*arrived]
        bucket = []
        written = []
        others = []
        for slot in slots:
            if slot.round == now or slot.group is not None:
                continue
            grad = slot.param.grad
            if grad is None:
                continue  # the user has removed it since; ``_send_missing`` sends zeros for it
            request = slot.request
            if request is not None and not slot.mark and looks_alike(grad, slot):
                storage = grad.untyped_storage()
                if use_count(storage._cdata) == ALONE:
                    slot.starts, slot.round = request.starts, now
                    bucket.append((request, grad.data_ptr(), storage))
                    written.append(grad)
                    continue
            others.append((slot, grad))
        if bucket:
            self._start_all(bucket, written)
        self._usual = UsualGradients(slots if len(bucket) == len(slots) else [])
        for slot, grad in others:
            if slot.round != now:  # a slot may be in ``arrived`` twice
                self._try_to_send(slot, grad)

    def _send_as_usual(self, arrived: Sequence[Slot]) -> bool:
        """Send the gradients with the persistent requests of the last round if these requests still fit.

        A round is one reduction of all gradients. Returns whether the requests fit. They fit if the same slots (records
        of gradients) have gradients of the same types and sizes again. This method reads each property of all gradients
        in one loop in C: a loop in Python takes twice as long (0.5 ms for 402 gradients).
        """
        usual = self._usual
        slots = usual.slots
        if slots != arrived:
            return False
        grads: list[Any] = [slot.param.grad for slot in slots]
        requests: list[Any] = [slot.request for slot in slots]
        if None in requests:
            return False
        try:
            if not usual.looks_alike(grads):
                return False
            storages = list(map(storage_of, grads))
        except TypeError:
            return False  # the user has removed a gradient since it arrived: it is None
        if set(map(use_count, map(address_of_storage, storages))) != {ALONE}:
            return False
        now = self.round.number
        for slot, request in zip(slots, requests):
            slot.starts, slot.round = request.starts, now
        self._start_all(list(zip(requests, map(address_of, grads), storages)), grads)
        return True

    def _start_all(self, started: Sequence[RequestStart], written: list[torch.Tensor]) -> None:
        """Start persistent requests together. If the start fails, keep the error until the end of the reduction.

        Each item of ``started`` is (request, address of the gradient, storage of the gradient). ``written`` lists the
        gradients themselves.
        """
        round = self.round
        try:
            self.binding.job.start_all(started)
        except (DdlInternalError, ValueError) as error:
            round.failure = round.failure or error
        round.written += written
        # The wait for a request that was not started because of an error returns at once.
        round.in_flight += [request for request, _, _ in started]

    def _send_missing(self, incomplete: bool) -> None:
        round = self.round
        now = round.number
        for group in self.groups:
            if group.round == now:
                continue
            if incomplete:
                for i, slot in enumerate(slot for slot in group.slots if slot.param.requires_grad):
                    self._send_end(slot, f"{group.name}[{i}]")
                group.round = now
            else:
                self._send_group(group)
        for slot in self.slots:
            if slot.round == now or slot.group is not None or not slot.param.requires_grad:
                continue
            if incomplete:
                self._send_end(slot, slot.name)
                continue
            if slot.holds_result:
                slot.before_gradient(None)
            grad = slot.param.grad
            self._try_to_send(slot, self._zeros(slot) if grad is None else grad)

    def has_unsent(self) -> bool:
        """Return whether this rank must still send a gradient of the current reduction. Other ranks wait for it."""
        now = self.round.number
        return any(group.round != now for group in self.groups) or any(
            slot.round != now and slot.group is None and slot.param.requires_grad for slot in self.slots
        )

    def _send_end(self, slot: Slot, name: str) -> None:
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
            self._start(request, zeros.data_ptr(), (zeros, request.source.owner))
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

    # --- one gradient that does not look like the last one

    def _try_to_send(self, slot: Slot, grad: torch.Tensor) -> None:
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
            grad = self._zeros(slot)
        if grad.is_sparse:
            if not self.reduction.sparse_as_dense:
                self._send_sparse(slot, grad)
                return
            if not slot.sparse_dims:
                slot.forget_look()
            slot.sparse_dims = grad.sparse_dim()
            slot.param.grad = grad = grad.to_dense()
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
                round.results[slot] = Result(grad, grad, True)
        else:
            value = torch.empty_like(grad)
            if slot.private is None:
                slot.private = self.binding.persistent_allreduce(grad, output=value, **what)
            request = slot.private
            request.set_target(value.data_ptr(), value)
            # Version 0 means that autograd has made this tensor in this pass: accumulating into an older ``.grad``
            # would have raised the version.
            round.results[slot] = Result(grad, value, grad._version == 0)
        if slot.mark is None:
            place = request.source.device
            slot.mark = None if place is CPU else ADAPTER.streams.mark(place)
            slot.submit = self.way_out(slot, grad)  # the parameter may have moved to another device since ``add``
        slot.starts, slot.round = request.starts, round.number
        if slot.mark is not None:
            slot.mark.set(request)
            self._start(request, grad.data_ptr(), (storage, slot.mark))
            round.on_devices.append(request)
            return
        self._start(request, grad.data_ptr(), storage)
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

    def _send_group(self, group: Group) -> None:
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
            grad = slot.param.grad if slot.param.grad is not None else self._zeros(slot)
            if grad.is_sparse:
                slot.sparse_dims = grad.sparse_dim()
                slot.param.grad = grad = grad.to_dense()
            members.append((slot, grad))
        if not members:
            return
        try:
            self._send_members(group, members)
        except (DdlInternalError, ValueError) as error:
            self.round.failure = self.round.failure or error

    def _send_members(self, group: Group, members: Sequence[tuple[Slot, torch.Tensor]]) -> None:
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

    def _zeros(self, slot: Slot) -> torch.Tensor:
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

    # --- sending again

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
        # same error, and this method runs again. If it comes after them, ``_resume`` finds that the gradient has no
        # request, and sends it.
        round.replaced.append(failed)
        if unknown:
            slot.sparse_dims = 1  # all sparse gradients that torch makes have one sparse dimension
        slot.request = slot.private = None
        slot.others = {}
        round.results.pop(slot, None)
        round.repeated.add(slot)
        self._send_anew(slot, self._zeros(slot) if unknown or grad is None else grad)
        return True


def _part(index: int, compressor: UserCompressor, ctx: Any, results: Sequence[torch.Tensor]) -> torch.Tensor:
    whole: torch.Tensor = compressor.decompress(results[index], ctx)
    return whole
