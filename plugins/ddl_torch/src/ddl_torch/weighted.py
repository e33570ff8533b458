"""Averages torch tensors with weights: the arithmetic of ``ddlcore.api.weighted``, also for tensors with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ddl_torch import autograd
from ddl_torch.autograd import ADAPTER, OPERATIONS, Call
from ddlcore.api import ProcessSet, UserCompressor, Waitable, check_weighted, checked_weight, current_job, weigh
from ddlcore.types import ReduceOp, Sum


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
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    single: bool,
    weight: Any,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Waitable:
    """Start the average of ``tensors``, and return its handle. The results are put into ``outputs`` by its ``wait``.

    The result of the handle is a list of tensors, or, if ``single``, the only tensor. Raises InvalidArgument as
    ``weighted_now`` does.
    """
    check_weighted(op, prescale_factor, postscale_factor)
    job = current_job()
    given = checked_weight(weight, len(process_set.resolve(job)[1]))
    for output in outputs or ():
        ADAPTER.require_writable(output)

    mine = weigh([tensor.detach() for tensor in tensors], given, "none", ADAPTER, ARITHMETIC)

    def placed(sums: list[torch.Tensor]) -> Any:
        results = mine.results(sums)
        if outputs is not None:
            with torch.no_grad():
                for output, result in zip(outputs, results, strict=True):
                    output.copy_(result)
            results = [*outputs]
        return results[0] if single else results

    how: Any = {"name": name, "op": Sum, "process_set": process_set, "part_of": mine.part_of, "job": job}
    return OPERATIONS.grouped_allreduce_async(mine.sent, then=placed, **how)
