"""Offers the collectives for torch tensors, except allreduce (allreduces.py), with Horovod's names and argument orders.

Every function is a collective: all members of ``process_set`` must call it with the same name. Calls without a name are
paired by their order, so all members must make them in the same order. Any thread may call the functions, and the
caller owns the results. Invalid arguments raise ValueError at once. A failure of the running job raises a
DdlInternalError (ddlcore.errors). ``root_rank`` is always a rank of the world, even within a process set. Only the
synchronous functions are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddl_torch import autograd
from ddl_torch.autograd import OPERATIONS, Call
from ddl_torch.compression import Compression
from ddl_torch.memory import hold_memory, mark_written_by
from ddlcore.api import (
    Mapped,
    ProcessSet,
    Waitable,
    current_job,
    global_process_set,
    resolve_op,
    wire_compression,
)
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average

# --- allgather


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all members, concatenated along the first dimension in rank order.

    The tensors may differ in the size of the first dimension only. The result is differentiable.
    """
    return autograd.allgather(Call(current_job(), process_set, name), tensor)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start an allgather and return a handle; ``synchronize(handle)`` returns the same as ``allgather``."""
    return OPERATIONS.allgather_async(tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return a list with the result of ``allgather`` for each of ``tensors``. The results are differentiable.

    All tensors are gathered as one group: no tensor is gathered before every member has submitted all tensors.
    """
    return autograd.grouped_allgather(Call(current_job(), process_set, name), tensors)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start an allgather of each tensor and return a handle; ``synchronize(handle)`` returns the list of results."""
    return OPERATIONS.grouped_allgather_async(tensors, name=name, process_set=process_set)


# --- broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return a new tensor with the values that ``tensor`` has on ``root_rank``. The result is differentiable."""
    return autograd.broadcast(Call(current_job(), process_set, name), tensor, root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start a broadcast and return a handle; ``synchronize(handle)`` returns the same as ``broadcast``."""
    return OPERATIONS.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite ``tensor`` with the values that ``tensor`` has on ``root_rank``, and return ``tensor``."""
    how: Any = {"output": tensor, "name": name, "process_set": process_set, "waits": True}
    result: torch.Tensor = mark_written_by(OPERATIONS.broadcast_async(tensor, root_rank, **how), [tensor]).wait()
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start to overwrite ``tensor`` with the values that ``tensor`` has on ``root_rank``, and return a handle.

    ``synchronize(handle)`` returns ``tensor``. The tensor cannot be resized any more, as after ``tensor.numpy()``.
    """
    hold_memory([tensor])
    return start_broadcast(tensor, root_rank, name, process_set)


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start to overwrite ``tensor`` with the values that ``tensor`` has on ``root_rank``, and return a handle.

    Unlike ``broadcast_async_``, this function leaves ``tensor`` resizable. So the caller must wait for the handle
    before any other code can resize the tensor.
    """
    handle = OPERATIONS.broadcast_async(tensor, root_rank, output=tensor, name=name, process_set=process_set)
    return mark_written_by(handle, [tensor])


# --- alltoall


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to each member r, and return the rows that this member receives.

    Without ``splits``, every member is sent the same number of rows. The received rows are ordered by the rank of the
    sender, and are differentiable. With ``splits``, the function returns a pair: the received rows, and an int32 tensor
    with the number of rows received from each member.
    """
    rows, received = autograd.alltoall(Call(current_job(), process_set, name), tensor, _splits(splits))
    return rows if splits is None else (rows, torch.tensor(received, dtype=torch.int32))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start an alltoall and return a handle; ``synchronize(handle)`` returns the same as ``alltoall``."""
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
            f"alltoall: splits must be a one-dimensional tensor of integers, one for each rank, "
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
    """Reduce ``tensor`` over all members, and return this member's rows of the reduced tensor.

    The rows are differentiable. If the rows cannot be divided evenly, the first members get one row more than the other
    members.
    """
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
    """Start a reducescatter and return a handle; ``synchronize(handle)`` returns the same as ``reducescatter``."""
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
    """Return a list with the result of ``reducescatter`` for each of ``tensors``. The results are differentiable.

    All tensors are reduced as one group: no tensor is reduced before every member has submitted all tensors.
    """
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
    """Start a reducescatter of each tensor and return a handle; ``synchronize(handle)`` returns the list of results."""
    return OPERATIONS.grouped_reducescatter_async(
        tensors,
        op=resolve_op(op),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
