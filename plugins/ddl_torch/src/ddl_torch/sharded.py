"""Recognizes tensors of which each rank has another part, as FSDP makes them. ddl sends tensors that are whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddlcore.errors import InvalidArgument

FSDP1 = "_fsdp_flattened"  # torch.distributed.fsdp sets it; torch 2.13 has no public way to ask


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether each rank has another part of ``tensor``, or whether ``tensor`` has no memory of its own.

    FSDP2 makes a parameter that wraps another tensor (a DTensor), and so do other libraries; such a tensor has the
    address 0. FSDP1 gives each parameter a plain tensor and a mark, also if it keeps the original parameters.
    """
    return hasattr(tensor, FSDP1) or is_traceable_wrapper_subclass(tensor)


def refuse_sharded(verb: str, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InvalidArgument if a tensor of ``pairs``, which are (name, tensor), is sharded. ``verb`` is what refuses."""
    sharded = [name for name, tensor in pairs if is_sharded(tensor)]
    if sharded:
        more = f" and {len(sharded) - 4} more" if len(sharded) > 4 else ""
        raise InvalidArgument(
            f"{verb}: {', '.join(sharded[:4])}{more}: a part of a tensor (FSDP) or a wrapper of other tensors "
            "(DTensor). ddl needs tensors that every rank has whole in memory of their own; where FSDP shards the "
            "parameters, leave gradients and parameters to FSDP"
        )
