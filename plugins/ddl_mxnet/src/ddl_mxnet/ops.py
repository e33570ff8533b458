"""The collectives for MXNet arrays, with the names and the argument orders of Horovod.

Every function is a collective: all members of ``process_set`` must call it with the same name, or, without a name, in
the same order. Any thread may call it, and the caller owns the results.

``allreduce``, ``broadcast`` and their variants return at once, as MXNet's own operators do. MXNet's engine writes the
values into the array later. A thread that waits for the array gets the values or the error. The other functions wait,
unless their names contain ``async``, because the shapes of their results are known only when all members have called
them. Functions that work in place, or whose names contain ``async``, are not differentiable.

``root_rank`` is always a rank of the world, even within a process set. ``priority`` is the priority in MXNet's engine:
operations with higher numbers run first. Invalid arguments raise ValueError at once. If the job fails while a function
runs, the function raises a DdlInternalError (see ``ddlcore.errors``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from ddl_mxnet import autograd
from ddl_mxnet.autograd import OPERATIONS, Call
from ddl_mxnet.compression import Compression
from ddl_mxnet.engine import is_naive
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
from ddlcore.types import Average, ReduceOp


def _filled(handle: Waitable, result: Any) -> Any:
    """Return ``result``, an array or a list of arrays into which MXNet's engine writes the values later.

    If MXNet uses its naive engine, first wait for ``handle``, the handle of the operation.
    """
    if is_naive():
        handle.wait()
    return result


# --- allreduce


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return a new array: ``postscale_factor * op(prescale_factor * every member's array)``.

    The result is differentiable.
    """
    wire, user = wire_compression(compression)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, name, resolve_op(op, average), *scales, wire, user, priority, group=False)
    return autograd.allreduce(call, [tensor])[0]


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Waitable:
    """Start an allreduce and return a handle; ``synchronize(handle)`` returns the new, reduced array."""
    how = _reduction(name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).allreduce_async(tensor, **how)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """Reduce ``tensor`` in place and return ``tensor``. MXNet's engine writes the result into it later."""
    how = _reduction(name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return _filled(OPERATIONS.at(priority).allreduce_async(tensor, output=tensor, **how), tensor)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Waitable:
    """Start to reduce ``tensor`` in place and return a handle; ``synchronize(handle)`` returns ``tensor``."""
    how = _reduction(name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).allreduce_async(tensor, output=tensor, **how)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Any = Compression.none,
) -> list[Any]:
    """Reduce ``tensors`` as one group, and return the results as a list of new arrays. The results are differentiable.

    The group is reduced only when all members have computed all its arrays.
    """
    wire, user = wire_compression(compression)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, name, resolve_op(op, average), *scales, wire, user, priority, group=True)
    return autograd.allreduce(call, tensors)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Waitable:
    """Start a grouped allreduce and return a handle; ``synchronize(handle)`` returns the list of new arrays."""
    how = _reduction(name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).grouped_allreduce_async(tensors, **how)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """Reduce all ``tensors`` in place as one group, and return ``tensors`` as a list.

    MXNet's engine writes the results into the arrays later.
    """
    how = _reduction(name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    handle = OPERATIONS.at(priority).grouped_allreduce_async(tensors, outputs=tensors, **how)
    filled: list[Any] = _filled(handle, list(tensors))
    return filled


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Waitable:
    """Start to reduce all ``tensors`` in place as one group, and return a handle.

    ``synchronize(handle)`` returns ``tensors`` as a list.
    """
    how = _reduction(name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).grouped_allreduce_async(tensors, outputs=tensors, **how)


def _reduction(
    name: str | None, op: ReduceOp, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> dict[str, Any]:
    return {
        "name": name,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }


# --- allgather


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the arrays of all members, concatenated along the first dimension in rank order.

    The arrays of the members may differ only in the size of the first dimension. The result is differentiable.
    """
    return autograd.allgather(Call(current_job(), process_set, name, priority=priority), [tensor])[0]


def allgather_async(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start an allgather and return a handle; ``synchronize(handle)`` returns the array that ``allgather`` returns."""
    return OPERATIONS.at(priority).allgather_async(tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Run an allgather of each array, as one group, and return the list of results.

    The results are differentiable.
    """
    return autograd.allgather(Call(current_job(), process_set, name, priority=priority, group=True), tensors)


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Waitable:
    """Start an allgather of each array and return a handle; ``synchronize(handle)`` returns the list of results."""
    return OPERATIONS.at(priority).grouped_allgather_async(tensors, name=name, process_set=process_set)


# --- broadcast


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a new array with the values of the array that ``root_rank`` passes. The result is differentiable."""
    return autograd.broadcast(Call(current_job(), process_set, name, priority=priority), tensor, root_rank)


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start a broadcast and return a handle; ``synchronize(handle)`` returns the array that ``broadcast`` returns."""
    return OPERATIONS.at(priority).broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite ``tensor`` with the root's values, and return ``tensor``. MXNet's engine writes the values later."""
    return _filled(broadcast_async_(tensor, root_rank, name, priority, process_set), tensor)


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start to overwrite ``tensor`` with the root's values, and return a handle.

    ``synchronize(handle)`` returns ``tensor``.
    """
    operations = OPERATIONS.at(priority)
    return operations.broadcast_async(tensor, root_rank, output=tensor, name=name, process_set=process_set)


# --- alltoall


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to member r, and return the rows that this member receives.

    If ``splits`` is None, each member gets the same number of rows, and the result is the array of received rows. If
    ``splits`` is an array or a list, the result is a pair: the array of received rows, and an int32 array with the
    number of rows from each member. The received rows are ordered by the rank of the sender, and are differentiable.
    """
    call = Call(current_job(), process_set, name, priority=priority)
    result = autograd.alltoall(call, tensor, _splits(splits))
    return result[0] if splits is None else _rows_and_splits(result)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """Start an alltoall and return a handle; ``synchronize(handle)`` returns the result that ``alltoall`` returns."""
    operations = OPERATIONS.at(priority)
    handle = operations.alltoall_async(tensor, _splits(splits), name=name, process_set=process_set)
    then: Callable[[Any], Any] = _rows_alone if splits is None else _rows_and_splits
    return Mapped(handle, then)


def _rows_alone(result: tuple[Any, list[int]]) -> Any:
    return result[0]


def _rows_and_splits(result: tuple[Any, list[int]]) -> tuple[Any, Any]:
    return result[0], mx.nd.array(result[1], dtype="int32")


def _splits(splits: Any) -> list[int] | None:
    if not isinstance(splits, mx.nd.NDArray):
        return splits if splits is None else list(splits)
    values = splits.asnumpy()
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidArgument(
            "alltoall: splits must be a one-dimensional array of integers, one for each rank, "
            f"not {values.ndim}-dimensional {values.dtype.name}; pass dtype='int32' where you make it"
        )
    rows: list[int] = values.tolist()
    return rows


# --- reducescatter


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
) -> Any:
    """Reduce the arrays of all members, and return this member's rows of the reduced array.

    If the rows cannot be divided evenly, each of the first members gets one row more than the other members. The
    returned rows are differentiable.
    """
    how = (op, name, priority, process_set, prescale_factor, postscale_factor, compression)
    return _scattered([tensor], False, *how)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
) -> list[Any]:
    """Run a reducescatter of each array, as one group, and return the list of results.

    The results are differentiable.
    """
    how = (op, name, priority, process_set, prescale_factor, postscale_factor, compression)
    return _scattered(tensors, True, *how)


def _scattered(
    tensors: Sequence[Any],
    group: bool,
    op: int,
    name: str | None,
    priority: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any,
) -> list[Any]:
    wire, user = wire_compression(compression)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, name, resolve_op(op), *scales, wire, priority=priority, group=group)
    if user is None:
        return autograd.reducescatter(call, tensors)
    pairs = [user.compress(tensor) for tensor in tensors]
    reduced = autograd.reducescatter(call, [packed for packed, _ in pairs])
    return [user.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs)]


def reducescatter_async(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Waitable:
    """Start a reducescatter and return a handle; ``synchronize(handle)`` returns the rows of ``reducescatter``."""
    how = _reduction(name, resolve_op(op), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).reducescatter_async(tensor, **how)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Waitable:
    """Start a reducescatter of each array and return a handle; ``synchronize(handle)`` returns the list of results."""
    how = _reduction(name, resolve_op(op), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).grouped_reducescatter_async(tensors, **how)
