"""Waits for the reduced gradients of a round, and puts them into ``.grad`` or into memory that other code reads.

A round is one reduction of all gradients of an optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddl_torch.memory import is_alone
from ddl_torch.rounds import ReducedGradient, Round
from ddl_torch.slots import Slot
from ddl_torch.unusual import UnusualSender
from ddlcore.api import wait_for_all
from ddlcore.contracts import Event, PersistentRequest
from ddlcore.errors import DdlInternalError


def wait(sender: UnusualSender) -> None:
    """Wait for all operations of the sender's current round (one reduction of all gradients).

    An operation's error is kept until the end of the round. Any other exception is an interrupt and is raised at once.
    """
    round = sender.round
    in_flight = round.in_flight
    while in_flight:
        last = len(in_flight) - 1
        request = in_flight[last]
        if not request.succeeded():  # most have succeeded: one wait runs a whole bucket
            try:
                request.wait()
            except (DdlInternalError, ValueError) as error:
                _operation_failed(sender, request, error)  # it may append another request
        # Requests that were appended, because they were sent again, go to the front and are waited for last. The ranks
        # find out in different orders which gradients they must send again. If a rank waited for one such gradient
        # before it has sent the others, the ranks could wait for each other forever.
        if len(in_flight) > last + 1:
            in_flight[:] = in_flight[last + 1 :] + in_flight[:last]
        else:
            del in_flight[last]
    if round.on_devices:
        _wait_on_streams(sender)
    while pending := [slot for slot, attempt in round.attempts.items() if not attempt.done]:
        for slot in pending:
            attempt = round.attempts[slot]
            if attempt.handle is not None:  # None: the operation was refused
                try:
                    _note_result(round, slot, attempt.handle.wait())
                except (DdlInternalError, ValueError) as error:
                    if sender.send_otherwise(slot, attempt.handle, error):
                        continue  # wait for it when all others have been sent again too, for the reason above
                    round.failure = round.failure or error
            attempt.done = True
    answers = [handle for answer in round.answers.values() for handle in answer.handles]
    _, failure = wait_for_all(answers, (DdlInternalError, ValueError))
    round.failure = round.failure or failure


def _operation_failed(sender: UnusualSender, request: PersistentRequest, error: Exception) -> None:
    slot = sender.slot_of(request)
    if slot is not None:
        if sender.send_otherwise(slot, request, error):
            return
        sender.round.results.pop(slot, None)
    elif any(request is one for one in sender.round.replaced):
        return  # it was sent again, then an interrupt came before it was removed from ``in_flight``
    sender.round.failure = sender.round.failure or error


def _wait_on_streams(sender: UnusualSender) -> None:
    """Make the current streams wait for the requests in flight on devices, with one wait for each device event.

    The requests of one bucket share one event, so there are fewer events than requests.
    """
    on_devices = sender.round.on_devices
    done = 0
    while done < len(on_devices):  # a request that fails may be sent once more, which appends another
        requests, done = on_devices[done:], len(on_devices)
        behind: dict[Event, PersistentRequest] = {}  # event -> a request whose result is ready after that event
        for request in reversed(requests):
            try:
                event = request.arrive()
                if event is not None:
                    behind.setdefault(event, request)
            except (DdlInternalError, ValueError) as error:
                _operation_failed(sender, request, error)
        for request in behind.values():
            try:
                request.wait()
            except (DdlInternalError, ValueError) as error:
                _operation_failed(sender, request, error)
    on_devices.clear()


def _note_result(round: Round, slot: Slot, value: torch.Tensor) -> None:
    grad = slot.param.grad
    if grad is None:
        return  # the user has removed it since
    fresh = grad.is_sparse or value.is_sparse or (grad._version == 0 and not is_alone(grad.untyped_storage()))
    if value is grad and slot.kept is None and not slot.sparse_dims:
        round.written.append(grad)
        return
    round.results[slot] = ReducedGradient(grad, value, fresh or slot.kept is not None)


def place(round: Round, slots: Sequence[Slot], apart: bool, scale: float = 1.0) -> None:
    """Put all results into ``.grad``, and into the memory of the gradient if other code uses it.

    An interrupt may come at any call, so each part may safely run twice. ``apart`` is described in ``Sender``.
    Results to which an earlier one is added are multiplied by ``scale`` first, and their slots noted as divided.
    """
    results, placed = round.results, round.placed
    if apart:
        for slot in slots:
            grad = slot.param.grad
            if slot.kept is not None and slot not in results and grad is not None:
                results[slot] = ReducedGradient(grad, grad, True)
    for slot, (grad, value, fresh) in results.items():
        if slot in placed:
            continue
        if slot.private is not None:
            slot.private.release_target()
        if slot.sparse_dims and not value.is_sparse:
            value = value.to_sparse(slot.sparse_dims)  # the optimizer of this parameter expects a sparse gradient
        if slot.kept is not None:
            value = slot.kept + (value if scale == 1.0 else value * scale)
            round.divided.add(slot)
        elif value is not grad and not fresh and not value.is_sparse:
            with torch.no_grad():  # other code uses this memory, and may expect the result in it
                grad.copy_(value)
            value = grad
        # No signal handler can run between these assignments: Python runs handlers at calls and at backward jumps only.
        # If an interrupt could come after ``slot.kept = None``, the second run would lose the kept result.
        slot.agreed = True
        slot.param.grad = value
        slot.kept = None
        placed.add(slot)
