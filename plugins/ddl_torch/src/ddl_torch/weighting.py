"""Weighs the gradients of one optimizer: what each backward pass counts for, and by what results are divided.

The average over all passes and ranks is sum(w * g) / sum(w). Each rank multiplies its gradients by w / 2**e before they
are sent, and they are added over the ranks. The sum of the weights, also divided by 2**e, travels as one more small
tensor beside them, and divides the results before they are given out. The *exponent* e makes these numbers as large as
those of an unweighted average, so that 16-bit types hold them; it follows from the last sum, so all ranks have the same.
If the weights are shares, their sum is 1, and nothing more is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp, ldexp
from typing import Any

import torch

from ddl_torch.memory import ALONE, is_alone, use_count
from ddl_torch.passes import INCOMPLETE
from ddl_torch.slots import Slot
from ddl_torch.usual import address_of_storage, has_lazy_views, is_sparse, storage_of
from ddlcore.api import Share, checked_weight, reciprocal_of
from ddlcore.errors import DdlInternalError, IncompleteGradients, InvalidArgument

OTHER_KIND = (
    "the weight of this optimizer is {now} and was {before}; use one kind for all steps of an optimizer: a Share, of which all "
    "ranks know the total, or a plain number"
)
NO_PASS = (
    "optimizer.step() was called without backward(), and this rank has {share} of the batch: the shares of the others do not "
    "add up to 1; call backward() on all ranks that have rows, or pass the number of rows as the weight"
)
OF_A_SUM = 4  # elements of the tensor that carries the sum of the weights
OUT_OF_STEP = (
    "the ranks disagree about the last sum of their weights, so this step cannot be divided; did a rank catch an error of "
    "the last step that the others have not seen?"
)


class Weights:
    """The weights of one optimizer's passes. ``given`` is a number, a Share, or a function that returns one of them."""

    def __init__(self, given: Any, members: int) -> None:
        self.members = members  # the number of ranks whose gradients are averaged
        self.exponent = 0
        self.turn = 0  # counts backward passes and rounds: each gradient is weighed once in a turn
        self.accumulated = False  # whether a pass since the last round has only accumulated gradients
        self.passed = 0.0  # the sum of the weights of such passes
        self.current: float | Share = 0.0  # the weight of the last pass, unless it is in ``passed``
        self.computed = False  # whether a pass has begun since the last round
        self.by_share: bool | None = None  # None: not known before the first pass
        self.sent = 0  # ``starts`` of the request before it was started in turn ``sent_in``
        self.sent_in = -1
        self._unkept: list[Slot] | None = None  # the slots of a pass that ``keep_pass`` has not kept to the end
        # Gradients that are multiplied together in turn ``_batch_turn``; None: each by itself.
        self._batch: list[torch.Tensor] | None = None
        self._batch_turn = self._batch_version = -1
        self._results: list[torch.Tensor] = []  # the same for the results
        self._results_turn = self._results_version = -1
        self._originals: dict[Slot, torch.Tensor] = {}  # gradients whose memory other code uses, until the round ends
        # Gradients of earlier steps, in a round of turn ``_earlier_turn`` for which this rank has computed none.
        self._earlier: list[tuple[Slot, torch.Tensor]] = []
        self._earlier_turn = -1
        self.set(given)

    def set(self, given: Any) -> None:
        """Use ``given`` for all passes that begin from now on. Raises ValueError for what cannot be a weight."""
        self.given = given if callable(given) else checked_weight(given, self.members)

    # --- passes

    def begin_pass(self) -> None:
        """Find out what the pass that begins counts for.

        Raises ValueError if it is nothing that can be a weight, and IncompleteGradients if an interrupt has ended
        ``keep_pass``: this pass has already added to gradients that it should have left alone.
        """
        if self._unkept is not None:
            raise IncompleteGradients(INCOMPLETE)
        self.current = self._asked()
        self.computed = True
        self.turn += 1

    def _asked(self) -> float | Share:
        weight = checked_weight(self.given() if callable(self.given) else self.given, self.members)
        by_share = isinstance(weight, Share)
        if self.by_share is not None and by_share is not self.by_share:
            kinds = ("a Share", "a number")
            raise InvalidArgument(OTHER_KIND.format(now=kinds[not by_share], before=kinds[by_share]))
        self.by_share = by_share
        return weight

    def keep_pass(self, slots: Sequence[Slot]) -> None:
        """Add the gradients of a pass that only accumulates, which have arrived in ``slots``, to the earlier ones."""
        self.accumulated = True  # so the weights of this round are summed over the ranks, also if they are shares
        self._unkept = [*slots]
        self._keep()

    def _keep(self) -> None:
        """Do what ``keep_pass`` promises. An interrupt may come at any call, so each part of it may run twice."""
        for slot in self._unkept or ():
            self.weigh(slot)
            slot.holds_sum = slot.param.grad is not None
        passed = self.passed + _rows(self.current)
        self.passed, self.current, self._unkept = passed, 0.0, None  # nothing is called here

    @property
    def counts(self) -> bool:
        """Whether the sum of the weights is reduced in this round: unless there is one pass, and its weights are shares."""
        if self.by_share is None:
            self._asked()
        return not self.by_share or self.accumulated

    def factor(self) -> float:
        """Return by what the gradients of the last pass are multiplied before they are sent or added to others."""
        if isinstance(self.current, Share) and not self.counts:
            return self.current.factor
        return ldexp(_rows(self.current), -self.exponent)

    # --- gradients

    def weigh(self, slot: Slot) -> None:
        """Multiply the gradient of ``slot`` by the weight of the last pass, and add what earlier passes have summed up.

        An interrupt may come at any call, so it may be called again in the same turn.
        """
        grad = slot.param.grad
        if grad is None or slot.holds_result or slot.holds_sum:
            return  # not of this pass
        if slot.weighed != self.turn:
            slot.raw, slot.version, slot.weighed = grad, grad._version, self.turn
        if grad is not slot.raw or grad._version != slot.version:
            return
        factor, summed = self.factor(), slot.summed
        # Autograd may give two gradients the same memory, or still read it: multiplying in place would change more than
        # this gradient. Of version 0 are gradients that autograd has made in this pass; for others, other code may expect
        # the result in their memory.
        alone = grad.is_sparse or (is_alone(grad.untyped_storage()) and not has_lazy_views([grad]))
        if summed is None and alone:
            _multiply([grad], factor)
        else:
            weighed = _sum(summed, grad.detach(), factor)
            if grad._version and not alone:
                self._originals.setdefault(slot, grad)
            slot.param.grad, slot.summed = weighed, None
        slot.raw = None

    def weigh_all(self, slots: Sequence[Slot], together: bool) -> None:
        """Do the same as ``weigh`` for all ``slots`` whose gradients are reduced.

        ``together``: none of them was weighed before in this turn, and none has a sum of earlier passes. Then one call
        multiplies all of them, unless some share memory.
        """
        if self._unkept is not None:
            self._keep()
        if not self.computed and self._earlier_turn != self.turn:
            self._keep_earlier(slots)
        if self._batch_turn != self.turn:
            grads = [grad for slot in slots if slot.param.requires_grad and (grad := slot.param.grad) is not None]
            if together and not any(map(is_sparse, grads)) and not has_lazy_views(grads) and _are_alone(grads):
                self._batch, self._batch_version = grads, grads[0]._version
            else:
                self._batch = None
            self._batch_turn = self.turn
        if self._batch is None:
            for slot in slots:
                if slot.param.requires_grad:
                    self.weigh(slot)
        elif self._batch[0]._version == self._batch_version:
            _multiply(self._batch, self.factor())

    def fill_originals(self) -> None:
        """Put results into the memory where other code expects them. An interrupt may come at any call."""
        for slot, original in self._originals.items():
            grad = slot.param.grad
            if grad is not None and grad is not original and not grad.is_sparse:
                original.detach().copy_(grad.detach())
                slot.param.grad = original

    def _keep_earlier(self, slots: Sequence[Slot]) -> None:
        """Copy the gradients of earlier steps: they count nothing, but stay if no rank has computed new ones.

        Raises InvalidArgument if the weights are shares and this rank has one: the others would not add up to 1.
        """
        given = self._asked()
        if isinstance(given, Share) and given.rows and not self.accumulated:
            raise InvalidArgument(NO_PASS.format(share=given))
        grads = [(slot, slot.param.grad) for slot in slots if not (slot.holds_result or slot.holds_sum)]
        earlier = [
            (slot, grad.detach().clone()) for slot, grad in grads if grad is not None and slot.param.requires_grad
        ]
        self._earlier, self._earlier_turn = earlier, self.turn

    def restore_earlier(self) -> None:
        """Put the gradients of earlier steps back into ``.grad``. An interrupt may come at any call."""
        for slot, earlier in self._earlier:
            grad = slot.param.grad
            if grad is None or grad.is_sparse:
                slot.param.grad = earlier
            else:
                grad.detach().copy_(earlier)

    # --- the sum of the weights

    def fill(self, tensor: torch.Tensor) -> None:
        """Write what this rank contributes to the sum of the weights into ``tensor``, of ``OF_A_SUM`` elements."""
        mine = ldexp(self.passed + _rows(self.current), -self.exponent)
        facts = [mine, float(self.exponent), 1.0, float(self.computed)]
        tensor.copy_(torch.tensor(facts, dtype=torch.float64))

    def scale_of(self, reduced: torch.Tensor) -> float | None:
        """Return by what results are multiplied; None if no rank has computed a gradient.

        ``reduced`` is the sum of what all ranks have written by ``fill``. Raises InvalidArgument if all weights were 0,
        on all ranks, and DdlInternalError if the ranks have different exponents.
        """
        total, exponents, ranks, computed = reduced.tolist()
        if exponents != self.exponent * ranks:
            raise DdlInternalError(OUT_OF_STEP)
        return reciprocal_of(total, "gradient") if computed else None

    def next_exponent(self, reduced: torch.Tensor) -> int:
        """Return the exponent of the round after that whose sum of the weights is ``reduced``."""
        total = reduced[0].item()
        return self.exponent + frexp(total)[1] if total > 0 else self.exponent

    def divide(self, results: Sequence[torch.Tensor], scale: float) -> None:
        """Multiply the results by ``scale``. An interrupt may come at any call, so it may be called again in a turn."""
        if self._results_turn != self.turn:
            self._results = [*results]
            self._results_version = self._results[0]._version if self._results else -1
            self._results_turn = self.turn
        if self._results and self._results[0]._version == self._results_version:
            _multiply(self._results, scale)

    def forget(self) -> None:
        """Forget the passes since the last round, because their gradients have been cleared."""
        self.accumulated, self.passed, self.current, self.computed = False, 0.0, 0.0, False
        self._unkept = None
        self._originals = {}

    def drop_lists(self) -> None:
        """Drop the gradients that are held for an interrupted call."""
        self._batch, self._results, self._earlier, self._originals = None, [], [], {}

    def begin_anew(self, slots: Sequence[Slot], members: int) -> None:
        """Begin in another job, whose ranks know nothing of the last sum of the weights."""
        for slot in slots:
            held = (slot.summed, slot.param.grad if slot.holds_sum else None)
            _multiply([one for one in held if one is not None], ldexp(1.0, self.exponent))
        self.exponent, self.members = 0, members


def _rows(weight: float | Share) -> float:
    return weight.rows if isinstance(weight, Share) else weight


def _are_alone(grads: Sequence[torch.Tensor]) -> bool:
    storages = list(map(storage_of, grads))
    return set(map(use_count, map(address_of_storage, storages))) == {ALONE}


def _multiply(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all ``tensors`` in one call. A factor of 0 gives 0, also for NaN: such values count nothing."""
    if not tensors:  # torch refuses an empty list
        return
    # Not within ``torch.no_grad()``: an interrupt at its beginning would leave autograd off for the rest of the program.
    # What ``detach`` returns shares the memory and the version of the gradient.
    plain = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    if factor == 0.0:
        torch._foreach_zero_(plain)
    elif factor != 1.0:
        torch._foreach_mul_(plain, factor)


def _sum(summed: torch.Tensor | None, grad: torch.Tensor, factor: float) -> torch.Tensor:
    """Return summed + factor * grad as a new tensor, or as one that nothing else uses."""
    if factor == 0.0:
        return torch.zeros_like(grad) if summed is None else summed
    if summed is None:
        return grad * factor
    if summed.is_sparse and not grad.is_sparse:
        return torch.add(grad * factor, summed)
    return torch.add(summed, grad, alpha=factor)
