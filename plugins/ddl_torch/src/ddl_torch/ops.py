"""The verbs for torch tensors under Horovod's names and argument orders; how they are carried out is the core's.

Every one of them is a collective: all members of ``process_set`` call it, with the same name (or, without
one, in the same order). Any thread may; results are the caller's. Wrong arguments raise ValueError at once,
what happens to a running job derives from DdlInternalError (ddlcore.errors). ``root_rank`` is a rank of the
world, also within a process set. Only the synchronous verbs are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ddl_torch import autograd
from ddl_torch.autograd import OPERATIONS, Call
from ddl_torch.compression import Compression
from ddlcore.api import (
    Mapped,
    ProcessSet,
    Waitable,
    current_job,
    global_process_set,
    resolve_op,
    wire_compression,
)
from ddlcore.errors import DdlInternalError, InvalidArgument
from ddlcore.types import Average, ReduceOp

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "start_broadcast",
]


def _touched(*tensors: torch.Tensor) -> None:
    """Tell autograd that these are written, so that it does not use saved values that are no more."""
    for tensor in tensors:
        increment_version(tensor)


def _written(handle: Waitable, *tensors: torch.Tensor) -> Waitable:
    """``handle`` of an operation that writes to ``tensors`` between now and the end of its wait.

    Both moments count: what autograd saved before the call is no more, and so is what it saved in between.
    """
    _touched(*tensors)

    def over(result: Any) -> Any:
        _touched(*tensors)
        return result

    return Mapped(handle, over)


def _hold_memory(tensors: Sequence[torch.Tensor]) -> None:
    """Keep the memory of host tensors where it is while an asynchronous operation writes to it.

    The operation holds the storage, so that ``set_`` and ``tensor.data = ...`` free nothing. ``resize_`` would: it
    gives the same storage other memory. No look at the address helps, since the tensor may grow while the machine
    code runs. So the storage is made one that cannot be resized, as ``tensor.numpy()`` makes it: torch then raises
    RuntimeError (and, a fault of its own, leaves the tensor object with the new shape). There is no way back, so
    that such a tensor cannot be resized later either; verbs that wait for their result do not need this, and do
    without it. Not covered: memory of a device.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.resizable():
                torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


# --- allreduce


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A new tensor: ``postscale_factor * op(prescale_factor * every member's tensor)``. Differentiable."""
    wire, user = wire_compression(compression)
    reduce_op = resolve_op(op, average)
    call = Call(current_job(), process_set, name, reduce_op, prescale_factor, postscale_factor, wire)
    if user is None:
        return autograd.allreduce(call, tensor)
    packed, ctx = user.compress(tensor)
    unpacked: torch.Tensor = user.decompress(autograd.allreduce(call, packed), ctx)
    return unpacked


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle of which ``synchronize`` makes the new, reduced tensor. ``tensor`` stays untouched until then."""
    return OPERATIONS.allreduce_async(
        tensor,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``tensor`` itself, reduced in place."""
    reduce_op = resolve_op(op, average)
    try:
        OPERATIONS.allreduce_in_place(
            tensor,
            name=name,
            op=reduce_op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
    except DdlInternalError:
        _touched(tensor)  # some of it may be written
        raise
    _touched(tensor)
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle whose result is ``tensor`` itself, reduced in place; nobody else may touch it until then.

    Its memory cannot be resized any more, as after ``tensor.numpy()``.
    """
    _hold_memory([tensor])
    handle = OPERATIONS.allreduce_async(
        tensor,
        output=tensor,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return _written(handle, tensor)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """New tensors, reduced as one: none of them is before all members have submitted all. Differentiable."""
    wire, user = wire_compression(compression)
    reduce_op = resolve_op(op, average)
    call = Call(current_job(), process_set, name, reduce_op, prescale_factor, postscale_factor, wire)
    if user is None:
        return autograd.grouped_allreduce(call, tensors)
    pairs = [user.compress(tensor) for tensor in tensors]
    reduced = autograd.grouped_allreduce(call, [packed for packed, _ in pairs])
    return [user.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle of which ``synchronize`` makes the list of new, reduced tensors."""
    return OPERATIONS.grouped_allreduce_async(
        tensors,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """The tensors themselves, reduced in place."""
    reduce_op = resolve_op(op, average)
    handle = _grouped_in_place(tensors, name, reduce_op, prescale_factor, postscale_factor, process_set)
    result: list[torch.Tensor] = handle.wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle whose result is the list of the tensors themselves, reduced in place; none may be resized any more."""
    reduce_op = resolve_op(op, average)
    _hold_memory(tensors)
    return _grouped_in_place(tensors, name, reduce_op, prescale_factor, postscale_factor, process_set)


def _grouped_in_place(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Waitable:
    handle = OPERATIONS.grouped_allreduce_async(
        tensors,
        outputs=tensors,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return _written(handle, *tensors)


# --- allgather


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All members' tensors, joined along the first dimension in rank order; it alone may differ. Differentiable."""
    return autograd.allgather(Call(current_job(), process_set, name), tensor)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``allgather`` returns."""
    return OPERATIONS.allgather_async(tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather`` of each tensor, as one. Differentiable."""
    return autograd.grouped_allgather(Call(current_job(), process_set, name), tensors)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``grouped_allgather`` returns."""
    return OPERATIONS.grouped_allgather_async(tensors, name=name, process_set=process_set)


# --- broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor with the root's values. Differentiable."""
    return autograd.broadcast(Call(current_job(), process_set, name), tensor, root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``broadcast`` returns."""
    return OPERATIONS.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """``tensor`` itself, with the root's values."""
    result: torch.Tensor = start_broadcast(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """A handle whose result is ``tensor`` itself, with the root's values; it cannot be resized any more."""
    _hold_memory([tensor])
    return start_broadcast(tensor, root_rank, name, process_set)


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """As ``broadcast_async_``, for a caller that waits before anybody could resize the tensor."""
    handle = OPERATIONS.broadcast_async(tensor, root_rank, output=tensor, name=name, process_set=process_set)
    return _written(handle, tensor)


# --- alltoall


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends ``splits[r]`` rows to member r (equally many without splits). Differentiable.

    Returns the rows received, by rank; where splits were given, (those, int32 tensor of how many came from each).
    """
    rows, received = autograd.alltoall(Call(current_job(), process_set, name), tensor, _splits(splits))
    return rows if splits is None else (rows, torch.tensor(received, dtype=torch.int32))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``alltoall`` returns."""
    handle = OPERATIONS.alltoall_async(tensor, _splits(splits), name=name, process_set=process_set)
    then: Callable[[Any], Any] = _rows_alone if splits is None else _rows_and_splits
    return Mapped(handle, then)


def _rows_alone(result: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
    return result[0]


def _rows_and_splits(result: tuple[torch.Tensor, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return result[0], torch.tensor(result[1], dtype=torch.int32)


def _splits(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    if not isinstance(splits, torch.Tensor):
        return splits if splits is None else list(splits)
    if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
        raise InvalidArgument(
            f"alltoall: splits must be a one-dimensional tensor of integers, one a rank, "
            f"not {splits.dim()}-dimensional {splits.dtype}"
        )
    rows: list[int] = splits.tolist()
    return rows


# --- reducescatter


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This member's rows of the reduced tensor; the first members have one more where they must. Differentiable."""
    wire, user = wire_compression(compression)
    call = Call(current_job(), process_set, name, resolve_op(op), prescale_factor, postscale_factor, wire)
    if user is None:
        return autograd.reducescatter(call, tensor)
    packed, ctx = user.compress(tensor)
    unpacked: torch.Tensor = user.decompress(autograd.reducescatter(call, packed), ctx)
    return unpacked


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``reducescatter`` returns."""
    return OPERATIONS.reducescatter_async(
        tensor,
        op=resolve_op(op),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of each tensor, as one. Differentiable."""
    wire, user = wire_compression(compression)
    call = Call(current_job(), process_set, name, resolve_op(op), prescale_factor, postscale_factor, wire)
    if user is None:
        return autograd.grouped_reducescatter(call, tensors)
    pairs = [user.compress(tensor) for tensor in tensors]
    reduced = autograd.grouped_reducescatter(call, [packed for packed, _ in pairs])
    return [user.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``grouped_reducescatter`` returns."""
    return OPERATIONS.grouped_reducescatter_async(
        tensors,
        op=resolve_op(op),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
