"""Reads the arguments of torch's calls: lists of one tensor, options, tensors with gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddl_torch.adapter import dense_strides
from ddl_torch.distributed.layout import lands_in
from ddlcore.errors import InvalidArgument


def one_of(tensors: Any) -> torch.Tensor:
    """Return the tensor of a call that torch gives as a list of one, or as a tensor."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgument(f"a call has one tensor for each rank, not {len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def op_of(opts: Any) -> Any:
    """Return the reduction of a call, which comes as an object with options, or by itself."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def waits(opts: Any) -> bool:
    """Return whether the caller will wait for the work next."""
    return not getattr(opts, "asyncOp", True)


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy of it if it has gaps or overlaps itself."""
    return tensor if tensor.is_contiguous() or dense_strides(tensor) is not None else tensor.detach().contiguous()


def copies_back(tensors: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> Any:
    """Return a function that copies each of ``dense`` to its tensor; None if no tensor has such a copy."""
    pairs = [(tensor, copy) for tensor, copy in zip(tensors, dense) if copy is not tensor]

    def land(_: Any) -> None:
        for tensor, copy in pairs:
            lands_in(tensor)(copy)

    return land if pairs else None
