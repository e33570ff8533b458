"""The verbs for MXNet's arrays under Horovod's names and argument orders; how they are carried out is the core's.

Every one of them is a collective: all members of ``process_set`` call it, with the same name (or, without one, in
the same order). Any thread may; results are the caller's. ``allreduce``, ``broadcast`` and their kin return at once,
as MXNet's own operators do: the engine fills the array in, and whoever waits for it gets what became of the
operation. The others wait, for only their results tell their shapes. Wrong arguments raise ValueError at once; what
happens to a running job derives from DdlInternalError (ddlcore.errors). ``root_rank`` is a rank of the world, also
within a process set. ``priority`` is that of MXNet's engine: higher first. Verbs in place and those that end in
``async`` are not differentiable.
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

__all__ = [
    "OPERATIONS",
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
]


def _filled(handle: Waitable, result: Any) -> Any:
    """``result``, which MXNet's engine fills in; or waited for here, where MXNet computes at once."""
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
    """A new array: ``postscale_factor * op(prescale_factor * every member's array)``. Differentiable."""
    wire, user = wire_compression(compression)
    call = Call(
        current_job(),
        process_set,
        name,
        priority,
        False,
        resolve_op(op, average),
        prescale_factor,
        postscale_factor,
        wire,
        user,
    )
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
    """A handle of which ``synchronize`` makes the new, reduced array."""
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
    """``tensor`` itself, reduced in place by MXNet's engine."""
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
    """A handle whose result is ``tensor`` itself, reduced in place."""
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
    """New arrays, reduced as one: none of them is before all members have computed all. Differentiable."""
    wire, user = wire_compression(compression)
    call = Call(
        current_job(),
        process_set,
        name,
        priority,
        True,
        resolve_op(op, average),
        prescale_factor,
        postscale_factor,
        wire,
        user,
    )
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
    """A handle of which ``synchronize`` makes the list of new, reduced arrays."""
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
    """The arrays themselves, reduced in place by MXNet's engine."""
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
    """A handle whose result is the list of the arrays themselves, reduced in place."""
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
    """All members' arrays, joined along the first dimension in rank order; it alone may differ. Differentiable."""
    return autograd.allgather(Call(current_job(), process_set, name, priority), [tensor])[0]


def allgather_async(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``allgather`` returns."""
    return OPERATIONS.at(priority).allgather_async(tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """``allgather`` of each array, as one. Differentiable."""
    return autograd.allgather(Call(current_job(), process_set, name, priority, True), tensors)


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``grouped_allgather`` returns."""
    return OPERATIONS.at(priority).grouped_allgather_async(tensors, name=name, process_set=process_set)


# --- broadcast


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A new array with the root's values. Differentiable."""
    return autograd.broadcast(Call(current_job(), process_set, name, priority), tensor, root_rank)


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``broadcast`` returns."""
    return OPERATIONS.at(priority).broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``tensor`` itself, which MXNet's engine gives the root's values."""
    return _filled(broadcast_async_(tensor, root_rank, name, priority, process_set), tensor)


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle whose result is ``tensor`` itself, with the root's values."""
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
    """Sends ``splits[r]`` rows to member r (equally many without splits). Differentiable.

    Returns the rows received, by rank; where splits were given (an array or a list), (those, int32 array of how
    many came from each).
    """
    call = Call(current_job(), process_set, name, priority)
    result = autograd.alltoall(call, tensor, _splits(splits))
    return result[0] if splits is None else _rows_and_splits(result)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Waitable:
    """A handle of which ``synchronize`` makes what ``alltoall`` returns."""
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
            "alltoall: splits must be a one-dimensional array of integers, one a rank, "
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
    """This member's rows of the reduced array; the first members get one more where they do not divide evenly.

    Differentiable.
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
    """``reducescatter`` of each array, as one. Differentiable."""
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
    call = Call(current_job(), process_set, name, priority, group, resolve_op(op), *scales, wire)
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
    """A handle of which ``synchronize`` makes what ``reducescatter`` returns."""
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
    """A handle of which ``synchronize`` makes what ``grouped_reducescatter`` returns."""
    how = _reduction(name, resolve_op(op), prescale_factor, postscale_factor, process_set)
    return OPERATIONS.at(priority).grouped_reducescatter_async(tensors, **how)
