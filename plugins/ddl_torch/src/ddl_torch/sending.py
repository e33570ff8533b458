"""Sends the gradients of a round, while backward runs or at its end, in the fastest way that each of them allows.

A round is one reduction of all gradients. If a gradient has the type, layout and device of the same parameter's last
gradient, and nothing else uses its memory, its persistent request is started, which reduces the gradient in place.
Otherwise it is sent in the general way (unusual.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddl_torch.autograd import ADAPTER
from ddl_torch.binding import bind
from ddl_torch.memory import ALONE, pin_size, use_count
from ddl_torch.rounds import Round
from ddl_torch.slots import GradientGroup, Reduction, Slot, looks_alike, looks_alike_there
from ddl_torch.unusual import UnusualSender
from ddl_torch.usual import UsualGradients, address_of, address_of_storage, storage_of
from ddl_torch.weight_sum import WeightSum
from ddl_torch.weighting import Weights
from ddlcore.contracts import RequestStart
from ddlcore.errors import DdlInternalError
from ddlcore.types import CPU

ACCUMULATED_AGAIN = (
    "the gradient of {name!r} was computed a second time within one backward(), while its reduction was under way: "
    "re-entrant checkpointing of a shared parameter does that. Use torch.utils.checkpoint(..., use_reentrant=False), "
    "or DDL_OVERLAP=off, which reduces gradients at the end of backward()"
)


class Sender:
    """The part that sends the gradients of one optimizer: from hooks while backward runs, or at the end of the pass."""

    def __init__(self, reduction: Reduction, round: Round, weight: Any = None) -> None:
        """Create a sender without parameters. ``weight`` is that of an average with weights, see ``Weights``."""
        self.reduction = reduction
        self.round = round
        self.slots: list[Slot] = []
        self.groups: list[GradientGroup] = []
        binding = self.binding = bind(reduction)
        self.eager = False  # whether any gradient is sent while backward runs
        self.apart = False  # whether passes compute their gradients apart from earlier results and sums
        weights = Weights(weight, binding.members) if reduction.weighted else None
        self.weight_sum = None if weights is None else WeightSum(weights, round, self.slots)
        self.unusual = UnusualSender(reduction, round, self.slots, binding, weights, self.way_out)
        # These are kept here, because gradients that are always unusual, such as sparse ones, need them in each step.
        self._try_to_send, self._send_group = self.unusual.try_to_send, self.unusual.send_group
        self._zeros = self.unusual.zeros
        self._start: Callable[..., Any] = binding.job.start_request
        self._usual = UsualGradients([])

    def bind_anew(self) -> None:
        """Use the job that is current now."""
        self.binding = self.unusual.binding = bind(self.reduction)

    def begin_round(self) -> None:
        """Open the next round, which is one reduction of all gradients."""
        self._start = self.unusual.start = self.binding.job.start_request  # of another job after shutdown() and init()
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
        return way if self.weight_sum is None else partial(self._weigh_and_send, self.weight_sum.weights, way)

    # --- weights

    def _weigh_and_send(self, weights: Weights, way: Callable[[Slot], None], slot: Slot) -> None:
        weights.weigh(slot)
        way(slot)

    def _weigh_all(self, weight_sum: WeightSum) -> None:
        """Weigh the gradients that were not weighed while backward ran, and send the sum of this rank's weights."""
        weights = weight_sum.weights
        weights.weigh_all(self.slots, together=not (self.eager or self.apart))
        if weights.counts:
            weight_sum.send(self.binding, self.reduction.process_set, self._start)

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
        if self.weight_sum is not None:
            self._weigh_all(self.weight_sum)
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
                    self.unusual.send_end(slot, f"{group.name}[{i}]")
                group.round = now
            else:
                self._send_group(group)
        for slot in self.slots:
            if slot.round == now or slot.group is not None or not slot.param.requires_grad:
                continue
            if incomplete:
                self.unusual.send_end(slot, slot.name)
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
