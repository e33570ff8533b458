"""Reduces sparse tensors by gathering the entries of all ranks. Coalescing then adds entries with equal indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddl_torch.autograd import OPERATIONS
from ddlcore.api import ProcessSet, Waitable, current_job, global_process_set, resolve_op
from ddlcore.contracts import JobService
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, ReduceOp, Sum


class SparseHandle:
    """The handle of a sparse allreduce in flight.

    Calling the handle waits for the result, as Horovod scripts expect.
    """

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
        """Return whether ``wait`` would return or raise immediately."""
        return self._indices.poll() and self._values.poll()

    @property
    def in_flight(self) -> tuple[Waitable, Waitable]:
        """The handles of the two operations of which this operation consists."""
        return self._values, self._indices

    def wait(self) -> torch.Tensor:
        """Wait for the operation and return the reduced tensor. Raises the error of the operation.

        The result is coalesced only if it is an average of integers.
        """
        values: torch.Tensor = (
            self._values.wait()
        )  # (entries, *dense dimensions); waited for first, because this is what fails if the ranks disagree
        indices: torch.Tensor = self._indices.wait()  # (entries, sparse dimensions)
        divisor = self._divisor
        if divisor != 1:
            divisor = getattr(self._values, "contributors", 0) or divisor  # fewer while some ranks have joined
            if not (values.is_floating_point() or values.is_complex()):
                return _mean_of_integers(indices.t(), values, self._shape, divisor)
            values = values / divisor
        return torch.sparse_coo_tensor(indices.t(), values, self._shape, check_invariants=False)

    __call__ = wait

    def send_values_again(self) -> None:
        """Gather the values again after a MismatchError, because another rank treated the tensor as dense.

        The indices need not be gathered again: their allgather is still in flight, because the other rank has not
        submitted it yet.
        """
        self._values = self._gather_values()


def _mean_of_integers(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int) -> torch.Tensor:
    """Return the exact mean of sparse integers, truncated toward zero and coalesced.

    Entries with the same index are added before their sum is divided by ``divisor``. Each value is split into two
    halves of 32 bits, whose sums cannot overflow. The halves are divided by long division.
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
    """Start the Sum or Average of sparse COO tensors of equal shape. The ranks may store different entries.

    All members of the process set must call this function. Any thread may call it. ``wait`` of the returned handle
    returns a new sparse tensor, which is coalesced only if it is an average of integers. Raises ValueError for another
    operation or layout.
    """
    return start_sparse(current_job(), tensor, name, resolve_op(op), process_set)


def start_sparse(
    job: JobService,
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    stage_on_host: bool = False,
    submitted: Sequence[Waitable] = (),
) -> SparseHandle:
    """Start the same operation as ``sparse_allreduce_async``, but in the world of ``job``.

    ``stage_on_host``: whether to gather a device's tensor through host memory. ``submitted``: the handles of the
    operations that an interrupted call with the same arguments has submitted, in order. These operations are not
    submitted again.
    """
    if tensor.layout is not torch.sparse_coo:
        raise InvalidArgument(
            f"sparse_allreduce_async takes a sparse COO tensor, not {tensor.layout}; use allreduce_async"
        )
    if op not in (Average, Sum):
        raise InvalidArgument(
            f"op={op.name} has no meaning for sparse tensors; use Average or Sum, or tensor.to_dense()"
        )
    if op is Average and tensor.dtype is torch.uint64:  # ``_mean_of_integers`` adds halves of int64
        raise InvalidArgument("the average of sparse uint64 is not available; use Sum, or tensor.to(torch.int64)")
    members = process_set.resolve(job)[1]
    tensor = tensor.detach()
    indices = tensor._indices().t().contiguous()  # not .indices(), which requires a coalesced tensor and so a sort
    values = tensor._values().contiguous().resolve_conj().resolve_neg()
    how: Any = {"process_set": process_set, "job": job, "sparse": True, "stage_on_host": stage_on_host}
    gather_indices = partial(
        OPERATIONS.allgather_async, indices, name=None if name is None else f"{name}.indices", **how
    )
    gather_values = partial(OPERATIONS.allgather_async, values, name=name, reduces=True, **how)
    first = submitted[0] if submitted else gather_indices()
    second = submitted[1] if len(submitted) > 1 else gather_values()
    return SparseHandle(first, second, tensor.shape, len(members) if op is Average else 1, gather_values)
