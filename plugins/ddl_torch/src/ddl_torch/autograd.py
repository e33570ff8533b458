"""Makes the collectives differentiable for torch tensors.

The backward pass of a collective runs collectives too, so all members of the process set must run the backward pass.
The rules for the gradients are those of Horovod; ``ddlcore.api.CollectiveCall`` lists them. Minimum, maximum and
product have no gradient: their backward pass raises NotImplementedError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ddl_torch.adapter import TorchAdapter
from ddlcore.api import CollectiveCall, Handle, Operations
from ddlcore.contracts import JobService, TensorEntry
from ddlcore.types import Average


class TorchOperations(Operations):
    """The collectives for torch tensors.

    Inside ``noting``, the handle of each submitted operation is also put into a list. After an interrupt (an exception
    that a signal handler raises), the caller finds in this list the operations that it has submitted.
    """

    def __init__(self) -> None:
        super().__init__(ADAPTER)
        self._thread = threading.local()

    @contextmanager
    def noting(self, handles: list[Handle]) -> Iterator[None]:
        """Return a context manager inside which this thread appends the handle of each operation to ``handles``.

        A handle is appended just before its operation is submitted. So a caller that was interrupted finds the handle
        of every operation that it has submitted.
        """
        self._thread.noted = handles
        try:
            yield
        finally:
            self._thread.noted = None

    def hand_over(self, job: JobService, handle: Handle, entries: Sequence[TensorEntry], waits: bool) -> None:
        noted = getattr(self._thread, "noted", None)
        if noted is not None:
            noted.append(handle)
        super().hand_over(job, handle, entries, waits)


ADAPTER = TorchAdapter()
OPERATIONS = TorchOperations()


class Call(CollectiveCall):
    """The arguments that the forward pass and the backward pass of one collective share."""

    advice: ClassVar[str] = "detach() the tensor, or use Average or Sum"


def _needs_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def allreduce(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Run the allreduce that ``call`` describes, and return the reduced tensor.

    The result is differentiable if ``tensor`` requires a gradient.
    """
    if _needs_gradient((tensor,)):
        return _applied(_Allreduce, call, tensor)[0]
    result: torch.Tensor = OPERATIONS.allreduce_async(tensor, waits=True, **call.reduction()).wait()
    return result


def grouped_allreduce(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the allreduce that ``call`` describes on all ``tensors`` as one group, and return the reduced tensors.

    All results become ready together. The results are differentiable if one of ``tensors`` requires a gradient.
    """
    if _needs_gradient(tensors):
        return list(_applied(_GroupedAllreduce, call, *tensors))
    results: list[torch.Tensor] = OPERATIONS.grouped_allreduce_async(tensors, waits=True, **call.reduction()).wait()
    return results


def allgather(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``tensor`` from all members of the process set, concatenated in rank order.

    The result is differentiable if ``tensor`` requires a gradient.
    """
    if _needs_gradient((tensor,)):
        return _applied(_Allgather, call, tensor)[0]
    result: torch.Tensor = OPERATIONS.allgather(tensor, **call.plain())
    return result


def grouped_allgather(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each of ``tensors``, the rows from all members of the process set, concatenated in rank order.

    All results become ready together. The results are differentiable if one of ``tensors`` requires a gradient.
    """
    if _needs_gradient(tensors):
        return list(_applied(_Allgather, call, *tensors))
    results: list[torch.Tensor] = OPERATIONS.grouped_allgather_async(tensors, waits=True, **call.plain()).wait()
    return results


def broadcast(call: Call, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Return a new tensor with the values that ``tensor`` has on the rank ``root_rank``.

    ``root_rank`` is a rank of the world, even within a process set. The result is differentiable if ``tensor`` requires
    a gradient.
    """
    if _needs_gradient((tensor,)):
        return _applied(_Broadcast, call, root_rank, tensor)[0]
    result: torch.Tensor = OPERATIONS.broadcast(tensor, root_rank, **call.plain())
    return result


def alltoall(call: Call, tensor: torch.Tensor, splits: list[int] | None) -> tuple[torch.Tensor, list[int]]:
    """Return the rows that were sent to this member, and a list with the number of rows from each member.

    ``splits[r]`` is the number of rows of ``tensor`` that this member sends to member r. If ``splits`` is None, every
    member is sent the same number of rows.
    """
    if _needs_gradient((tensor,)):
        received: list[int] = []
        return _applied(_Alltoall, call, splits, received, tensor)[0], received
    result: tuple[torch.Tensor, list[int]] = OPERATIONS.alltoall(tensor, splits, **call.plain())
    return result


def reducescatter(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Reduce ``tensor`` over all members of the process set, and return this member's rows of the reduced tensor.

    The result is differentiable if ``tensor`` requires a gradient.
    """
    if _needs_gradient((tensor,)):
        return _applied(_Reducescatter, call, tensor)[0]
    result: torch.Tensor = OPERATIONS.reducescatter(tensor, **call.reduction())
    return result


def grouped_reducescatter(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Reduce ``tensors`` over all members as one group, and return this member's rows of each reduced tensor.

    All results become ready together. The results are differentiable if one of ``tensors`` requires a gradient.
    """
    if _needs_gradient(tensors):
        return list(_applied(_Reducescatter, call, *tensors))
    results: list[torch.Tensor] = OPERATIONS.grouped_reducescatter_async(tensors, waits=True, **call.reduction()).wait()
    return results


def _applied(function: type[torch.autograd.Function], *args: Any) -> tuple[torch.Tensor, ...]:
    apply: Callable[..., tuple[torch.Tensor, ...]] = function.apply
    return apply(*args)


def _dense(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``gradients`` as row-major tensors with their values in memory.

    Autograd may pass gradients that are expanded tensors, or that have different layouts on different ranks, or that are
    conjugated or negated views.
    """
    return [gradient.contiguous().resolve_conj().resolve_neg() for gradient in gradients]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return (allreduce(call, tensor),)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        call.check_differentiable("allreduce")
        return None, allreduce(call.backward(), *_dense(gradients))


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return tuple(grouped_allreduce(call, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        call.check_differentiable("grouped_allreduce")
        return None, *grouped_allreduce(call.backward(), _dense(gradients))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        ctx.set_rank = call.set_rank()
        if len(tensors) == 1:
            return (allgather(call, *tensors),)
        return tuple(grouped_allgather(call, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call.backward()
        rows: list[int] = ctx.rows
        everyones = allgather(call.more("rows"), torch.tensor([rows]))  # (set size, tensors)
        before = everyones[: ctx.set_rank].sum(0).tolist()
        reduced = grouped_allreduce(replace(call, op=Average), _dense(gradients))
        return None, *(g.narrow(0, at, mine) for g, at, mine in zip(reduced, before, rows, strict=True))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, root_rank: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.is_root = call.job.rank == root_rank
        return (broadcast(call, tensor, root_rank),)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = allreduce(replace(ctx.call.backward(), op=Average), *_dense(gradients))
        return None, None, reduced if ctx.is_root else torch.zeros_like(reduced)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, splits: list[int] | None, received: list[int], tensor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        output, came = alltoall(call, tensor, splits)
        received.extend(came)
        ctx.received = received
        return (output,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = _dense(gradients)
        back, _ = alltoall(ctx.call.backward(), gradient, ctx.received)
        return None, None, None, back


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        if len(tensors) == 1:
            return (reducescatter(call, *tensors),)
        return tuple(grouped_reducescatter(call, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        call.check_differentiable("reducescatter")
        factor = call.gathered_scale()
        scaled = [gradient * factor for gradient in _dense(gradients)]
        return None, *grouped_allgather(call.backward(), scaled)
