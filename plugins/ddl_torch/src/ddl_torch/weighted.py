"""Averages torch tensors with weights: the arithmetic of ``ddlcore.api.weighted``, also for tensors with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ddl_torch import autograd
from ddl_torch.autograd import ADAPTER, OPERATIONS, Call
from ddlcore.api import UserCompressor, Waitable, check_weighted, checked_weight, weigh, weighted_average_async
from ddlcore.types import Sum


class _Arithmetic:
    """What an average with weights computes with torch tensors, see ``ddlcore.api.Arithmetic``."""

    def multiplied(self, tensor: torch.Tensor, factor: float, wide: bool) -> torch.Tensor:
        tensor = tensor.float() if wide else tensor
        if factor == 0.0:  # still a function of the tensor, as on the other ranks: backward is a collective
            return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0.0)
        return tensor * factor

    def number(self, value: float, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float64 if like.is_cpu else torch.float32, device=like.device)

    def value(self, number: torch.Tensor) -> float:
        return float(number.item())

    def result(self, total: torch.Tensor, factor: float, like: torch.Tensor) -> torch.Tensor:
        return (total * factor).to(like.dtype)


ARITHMETIC = _Arithmetic()


def weighted_now(
    call: Call, tensors: Sequence[torch.Tensor], weight: Any, user: UserCompressor | None
) -> list[torch.Tensor]:
    """Return the averages of ``tensors`` as new tensors. They are differentiable.

    ``user``: the user's compressor, or None. Raises InvalidArgument for what has no weighted average.
    """
    check_weighted(call.op, call.prescale_factor, call.postscale_factor)
    given = checked_weight(weight, len(call.members()))
    mine = weigh(tensors, given, call.compression if user is None else _name_of(user), ADAPTER, ARITHMETIC)
    summing = replace(call, op=Sum, part_of=mine.part_of)
    if user is None:
        return mine.results(autograd.grouped_allreduce(summing, mine.sent))
    pairs = [user.compress(tensor) for tensor in mine.sent]
    reduced = autograd.grouped_allreduce(summing, [packed for packed, _ in pairs])
    return mine.results([user.decompress(one, ctx) for one, (_, ctx) in zip(reduced, pairs, strict=True)])


def _name_of(user: Any) -> str:
    return str(getattr(user, "__name__", type(user).__name__))


def weighted(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None, single: bool, weight: Any, *how: Any
) -> Waitable:
    """Start the average of ``tensors``, and return its handle; see ``ddlcore.api.weighted_average_async``."""
    plain = [tensor.detach() for tensor in tensors]
    return weighted_average_async(OPERATIONS, ARITHMETIC, _place, plain, outputs, single, weight, *how)


@torch.no_grad()
def _place(outputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)
