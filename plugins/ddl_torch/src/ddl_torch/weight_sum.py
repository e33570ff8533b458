"""Reduces the sum of the ranks' weights together with the gradients, which are then divided by this sum.

If the weights are shares, their sum is known, and nothing is reduced here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddl_torch.autograd import OPERATIONS
from ddl_torch.binding import Binding
from ddl_torch.rounds import Round
from ddl_torch.slots import Slot
from ddl_torch.weighting import OF_A_SUM, Weights
from ddlcore.api import ProcessSet
from ddlcore.contracts import PersistentRequest
from ddlcore.errors import DdlInternalError, InvalidArgument


class WeightSum:
    """The tensor in which the sum of the weights of one optimizer's passes is reduced, and its requests."""

    def __init__(self, weights: Weights, round: Round, slots: list[Slot]) -> None:
        self.weights = weights
        self._round = round
        self._slots = slots
        self._tensor: torch.Tensor | None = None  # see ``Weights.fill``
        self._requests: dict[int, PersistentRequest] = {}  # by the round of a step

    def send(self, binding: Binding, process_set: ProcessSet, start: Callable[..., Any]) -> None:
        """Start to reduce the sum of the ranks' weights in this round.

        ``start`` is the job's ``start_request``. An interrupt may come at any call, so this method may be called again
        in the same round.
        """
        weights, round = self.weights, self._round
        request = self._requests.get(round.turn)
        if request is None:
            if self._tensor is None:  # of the gradients' type, so that they can share a bucket
                single = all(slot.param.dtype is torch.float32 for slot in self._slots)
                self._tensor = torch.zeros(OF_A_SUM, dtype=torch.float32 if single else torch.float64)
            request = self._requests[round.turn] = OPERATIONS.persistent_allreduce(
                self._tensor,
                name=round.name_of(binding.prefix.replace("gradient", "weight of gradient", 1)),
                op=binding.op,
                process_set=process_set,
                job=binding.job,
            )
        assert self._tensor is not None
        if weights.sent_in != weights.turn:
            weights.sent, weights.sent_in = request.starts, weights.turn
        if request.starts == weights.sent:  # otherwise an interrupt has come after the request was started
            weights.fill(self._tensor)
            try:
                start(request, self._tensor.data_ptr(), self._tensor)
            except (DdlInternalError, ValueError) as error:
                round.failure = round.failure or error
        if not any(one is request for one in round.in_flight):
            round.in_flight.append(request)

    def forget(self) -> None:
        """Drop the sum of the weights and its requests, because another job begins."""
        self._requests.clear()
        self._tensor = None  # what the last job left may still write to its memory

    def scale(self, active: bool) -> float | None:
        """Return the factor by which the gradients of this round must be multiplied; see ``Weights.scale_of``.

        If there is an error, store it as the failure of the round, and return 1. ``active`` says whether this rank
        takes part in the reduction.
        """
        weights, round = self.weights, self._round
        if round.failure is not None or not active or not weights.counts:
            return 1.0
        assert self._tensor is not None
        try:
            return weights.scale_of(self._tensor)
        except (DdlInternalError, InvalidArgument) as error:
            round.failure = error
            return 1.0

    def next_exponent(self, active: bool) -> int:
        """Return the exponent that the weights have in the next round. This round must have succeeded.

        ``active`` says whether this rank takes part in the reduction.
        """
        if self._tensor is not None and active and self.weights.counts:
            return self.weights.next_exponent(self._tensor)
        return self.weights.exponent
