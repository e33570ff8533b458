"""Gathers the state of a metric from all ranks, with the interface that torchmetrics requires."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ddl_torch.broadcast import allgather_object
from ddl_torch.ops import allgather
from ddlcore.api import ProcessSet, global_process_set, rank
from ddlcore.errors import InvalidArgument


@dataclass(frozen=True)
class _Form:
    """The shape and the type of one rank's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def gather_all_tensors(result: torch.Tensor, group: ProcessSet | None = None) -> list[torch.Tensor]:
    """Return a list that contains the tensor ``result`` of every member of ``group``, in rank order.

    All tensors of the list are on the device of this rank's tensor. Pass this function to torchmetrics as
    ``dist_sync_fn``; it has the same arguments as torchmetrics' own ``gather_all_tensors``::

        MeanMetric(dist_sync_fn=ddl.gather_all_tensors, distributed_available_fn=ddl.is_initialized)

    Every member must call this function. ``group`` is a process set, or None for all ranks. A metric passes its own
    argument ``process_group`` as ``group``. The tensors may differ in shape. A rank that has no data passes an empty
    tensor of one dimension; in the list, that tensor gets the type and the further dimensions of the other ranks'
    tensors. The list's entry for this rank is ``result`` itself, so gradients flow only through that entry. Raises
    ValueError if ``group`` is neither None nor a ProcessSet, and NotInitialized before ``init()``.
    """
    process_set = global_process_set if group is None else group
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgument(
            f"gather_all_tensors: group (a metric's process_group) is of type {type(group).__name__}; pass a "
            "ddl.ProcessSet, or None for all ranks"
        )
    forms = allgather_object(_Form(tuple(result.shape), result.dtype), process_set=process_set)
    flat = result.detach().contiguous().flatten().view(torch.uint8)  # (nbytes,) uint8
    everything = allgather(flat, process_set=process_set)  # (sum of nbytes,) uint8
    pieces = everything.split([form.nbytes for form in forms])
    # A clone begins at an address of its own, so it can be viewed as another type.
    gathered = [piece.clone().view(form.dtype).reshape(form.shape) for piece, form in zip(pieces, forms)]
    gathered[rank() if group is None else group.ranks.index(rank())] = result
    return _without_gaps_in_type(gathered)


def _without_gaps_in_type(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replace the tensors of ranks without data, so that all tensors can be concatenated, and return the new list.

    torchmetrics gives a rank without data an empty tensor of a floating-point type. With that tensor, torch.cat would
    change the type of the whole result.
    """
    filled = next((tensor for tensor in tensors if tensor.numel()), None)
    if filled is None or filled.ndim == 0:
        return tensors
    empty = filled.new_empty((0, *filled.shape[1:]))
    return [empty if tensor.shape == (0,) else tensor for tensor in tensors]
