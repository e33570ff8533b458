"""Reduces sparse tensors by gathering what each rank has; sums appear where indices repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddl_torch.autograd import OPERATIONS
from ddlcore.api import ProcessSet, Waitable, current_job, global_process_set, resolve_op
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, ReduceOp, Sum

__all__ = ["SparseHandle", "sparse_allreduce_async", "start_sparse"]


class SparseHandle:
    """A sparse allreduce under way. As Horovod's scripts expect, calling it is waiting for it."""

    def __init__(
        self,
        indices: Waitable,
        values: Waitable,
        shape: torch.Size,
        divisor: int,
        gather_values: Callable[[], Waitable],
    ) -> None:
        self._indices = indices
        self._values = values
        self._shape = shape
        self._divisor = divisor
        self._gather_values = gather_values

    def poll(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._indices.poll() and self._values.poll()

    def wait(self) -> torch.Tensor:
        """The reduced tensor, not coalesced (but for an average of integers); raises what the operation raises."""
        values: torch.Tensor = (
            self._values.wait()
        )  # (entries, *dense dimensions); first: where ranks disagree, this fails
        indices: torch.Tensor = self._indices.wait()  # (entries, sparse dimensions)
        if self._divisor != 1:
            if not values.is_floating_point():
                return _mean_of_integers(indices.t(), values, self._shape, self._divisor)
            values = values / self._divisor
        return torch.sparse_coo_tensor(indices.t(), values, self._shape, check_invariants=False)

    __call__ = wait

    def send_values_again(self) -> None:
        """After a MismatchError: gather the values once more, for a rank that had taken the tensor for a dense one.

        The indices are still under way, since that rank has not asked for them.
        """
        self._values = self._gather_values()


def _mean_of_integers(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int) -> torch.Tensor:
    """The exact mean, truncated toward zero, coalesced: entries of one index are added before they are divided.

    As halves of 32 bits, no sum of which overflows, and by long division.
    """
    wide = values.to(torch.int64)
    halves = [
        torch.sparse_coo_tensor(indices, half, shape, check_invariants=False).coalesce()
        for half in (wide >> 32, wide & 0xFFFFFFFF)
    ]
    high, low = (half.values() for half in halves)
    high, low = high + (low >> 32), low & 0xFFFFFFFF
    upper = torch.div(high, divisor, rounding_mode="floor")
    rest = ((high - upper * divisor) << 32) + low
    lower = torch.div(rest, divisor, rounding_mode="floor")
    mean = (upper << 32) + lower
    mean += (high < 0) & (rest != lower * divisor)
    return torch.sparse_coo_tensor(halves[0].indices(), mean.to(values.dtype), shape, is_coalesced=True)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Starts the Sum or Average of sparse COO tensors of one shape; ranks may differ in what they store.

    Every member calls it, from any thread. The handle's result is a new sparse tensor, not coalesced.
    Raises ValueError for another operation or layout.
    """
    return start_sparse(current_job(), tensor, name, resolve_op(op), process_set)


def start_sparse(
    job: Any,
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    stage_on_host: bool = False,
    submitted: Sequence[Waitable] = (),
) -> SparseHandle:
    """As ``sparse_allreduce_async``, in the world of ``job``; ``stage_on_host``: gathered in the host's memory.

    ``submitted``: the handles of what an interrupted call with the same arguments has submitted, in order.
    """
    if tensor.layout is not torch.sparse_coo:
        raise InvalidArgument(
            f"sparse_allreduce_async takes a sparse COO tensor, not {tensor.layout}; use allreduce_async"
        )
    if op not in (Average, Sum):
        raise InvalidArgument(
            f"op={op.name} has no meaning for sparse tensors; use Average or Sum, or tensor.to_dense()"
        )
    members = process_set.resolve(job)[1]
    tensor = tensor.detach()
    indices = tensor._indices().t().contiguous()  # not .indices(): that would make us coalesce, which sorts
    values = tensor._values().contiguous()
    how: Any = {"process_set": process_set, "job": job, "sparse": True, "stage_on_host": stage_on_host}
    gather_indices = partial(
        OPERATIONS.allgather_async, indices, name=None if name is None else f"{name}.indices", **how
    )
    gather_values = partial(OPERATIONS.allgather_async, values, name=name, reduces=True, **how)
    first = submitted[0] if submitted else gather_indices()
    second = submitted[1] if len(submitted) > 1 else gather_values()
    return SparseHandle(first, second, tensor.shape, len(members) if op is Average else 1, gather_values)
