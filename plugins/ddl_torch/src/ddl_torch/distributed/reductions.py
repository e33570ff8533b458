"""Translates torch's reduction operations into those of ddl."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, Max, Min, Product, ReduceOp, Sum

_Op = dist.ReduceOp.RedOpType
_OPS: dict[Any, ReduceOp] = {
    _Op.SUM: Sum,
    _Op.AVG: Average,
    _Op.PRODUCT: Product,
    _Op.MIN: Min,
    _Op.MAX: Max,
}
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


class ScaledOp(NamedTuple):
    """A reduction that ddl computes: ``op`` of the values times ``factor``."""

    op: ReduceOp
    factor: float = 1.0


def reduction(op: Any) -> ScaledOp | None:
    """Return ddl's reduction for torch's ``op``; None for the bitwise operations, which ddl does not have."""
    kind = getattr(op, "op", op)  # dist.ReduceOp.SUM is the plain kind, the options of a call have an object around it
    if kind == _Op.PREMUL_SUM:
        _, factor = op.__getstate__()
        return ScaledOp(Sum, float(factor))
    found = _OPS.get(kind)
    if found is None and kind not in _BITWISE:
        raise InvalidArgument(
            f"the reduction {kind} is unknown to ddl; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR"
        )
    return None if found is None else ScaledOp(found)


def bitwise(op: Any, gathered: torch.Tensor) -> torch.Tensor:
    """Return the bitwise reduction of the rows of ``gathered``, which has one row for each rank."""
    if gathered.is_floating_point() or gathered.is_complex():
        raise InvalidArgument(f"bitwise operations are for integers, not for {gathered.dtype}")
    return functools.reduce(_BITWISE[getattr(op, "op", op)], gathered.unbind(0))
