"""Translates torch's reduction operations into those of ddl."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddlcore.api.reduce_calls import ReduceArguments
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, Max, Min, Product, ReduceOp, Sum

_Op = dist.ReduceOp.RedOpType
_PLAIN: dict[Any, ReduceOp] = {
    _Op.SUM: Sum,
    _Op.AVG: Average,
    _Op.PRODUCT: Product,
    _Op.MIN: Min,
    _Op.MAX: Max,
}
_OPS = {kind: ReduceArguments(op, 1.0, 1.0, "none") for kind, op in _PLAIN.items()}
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


def reduction(op: Any) -> ReduceArguments | None:
    """Return how ddl computes torch's ``op``; None for the bitwise operations, which ddl does not have."""
    kind = getattr(op, "op", op)  # dist.ReduceOp.SUM is the plain kind, the options of a call have an object around it
    found = _OPS.get(kind)
    if found is None and kind == _Op.PREMUL_SUM:
        _, factor = op.__getstate__()
        return ReduceArguments(Sum, float(factor), 1.0, "none")
    if found is None and kind not in _BITWISE:
        raise InvalidArgument(
            f"the reduction {kind} is unknown to ddl; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR"
        )
    return found


def require_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``. Raises InvalidArgument if bitwise operations are not possible for it."""
    if tensor.is_floating_point() or tensor.is_complex():
        raise InvalidArgument(f"bitwise operations are for integers, not for {tensor.dtype}")
    return tensor


def bitwise_name(op: Any) -> str:
    """Return the name of a bitwise operation, for messages."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def bitwise(op: Any, gathered: torch.Tensor) -> torch.Tensor:
    """Return the bitwise reduction of the rows of ``gathered``, which has one row for each rank."""
    return functools.reduce(_BITWISE[getattr(op, "op", op)], gathered.unbind(0))
