"""The verbs for numpy arrays, with the arguments that Horovod's have; ``import ddlcore`` offers these functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddlcore.api.operations import Operations
from ddlcore.api.world import ProcessSet, global_process_set
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.runtime.handle import Handle
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
]

Array = Any  # numpy.ndarray; numpy's own types would make every caller import them
_ops = Operations(NumpyAdapter())


def _start(
    tensor: Array,
    output: Array | None,
    waits: bool,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
) -> Handle:
    return _ops.allreduce_async(
        tensor,
        output=output,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
        waits=waits,
    )


def allreduce_async(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
) -> Handle:
    """Start an allreduce of the ranks' arrays with ``op`` into a new array, and return its handle.

    ``prescale_factor`` multiplies the values before the reduction, and ``postscale_factor`` the result after it.
    """
    return _start(tensor, None, False, name, op, prescale_factor, postscale_factor, process_set, compression)


def allreduce_async_(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
) -> Handle:
    """Start an allreduce that writes its result to ``tensor``, and return its handle."""
    return _start(tensor, tensor, False, name, op, prescale_factor, postscale_factor, process_set, compression)


def allreduce(tensor: Array, *args: Any, **kwargs: Any) -> Array:
    """Run ``allreduce_async`` with these arguments, wait for it, and return its result."""
    return _start(tensor, None, True, *args, **kwargs).wait()


def allreduce_(tensor: Array, *args: Any, **kwargs: Any) -> Array:
    """Run ``allreduce_async_`` with these arguments, wait for it, and return ``tensor``."""
    _reduce_in_place(tensor, *args, **kwargs)
    return tensor


def _reduce_in_place(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
) -> None:
    _ops.allreduce_in_place(
        tensor,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
    )


def grouped_allreduce_async(
    tensors: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
) -> Handle:
    """Start an allreduce of several arrays; none is reduced before all are ready. Return its handle.

    The result of the handle is a list of new arrays.
    """
    return _ops.grouped_allreduce_async(
        tensors,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
) -> Handle:
    """Start an allreduce of several arrays that writes the results to them, and return its handle.

    No array is reduced before all are ready.
    """
    return _ops.grouped_allreduce_async(
        tensors,
        outputs=tensors,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
    )


def grouped_allreduce(tensors: Sequence[Array], *args: Any, **kwargs: Any) -> list[Array]:
    """Run ``grouped_allreduce_async`` with these arguments, wait for it, and return its result."""
    return list(grouped_allreduce_async(tensors, *args, **kwargs).wait())


def grouped_allreduce_(tensors: Sequence[Array], *args: Any, **kwargs: Any) -> list[Array]:
    """Run ``grouped_allreduce_async_`` with these arguments, wait for it, and return the arrays ``tensors``."""
    return list(grouped_allreduce_async_(tensors, *args, **kwargs).wait())


def allgather_async(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an allgather along the first dimension, and return its handle.

    The arrays of the ranks may have different sizes in the first dimension.
    """
    return _ops.allgather_async(tensor, name=name, process_set=process_set)


def allgather(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Run ``allgather_async``, wait for it, and return its result."""
    return allgather_async(tensor, name, process_set).wait()


def grouped_allgather_async(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather of several arrays; none is gathered before all are ready. Return its handle."""
    return _ops.grouped_allgather_async(tensors, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Run ``grouped_allgather_async``, wait for it, and return its result."""
    return list(grouped_allgather_async(tensors, name, process_set).wait())


def broadcast_async(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast from ``root_rank`` (a rank of the world) into a new array, and return its handle."""
    return _ops.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Run ``broadcast_async``, wait for it, and return its result."""
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast from ``root_rank`` that writes its result to ``tensor``, and return its handle."""
    return _ops.broadcast_async(tensor, root_rank, output=tensor, name=name, process_set=process_set)


def broadcast_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Run ``broadcast_async_``, wait for it, and return ``tensor``."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def alltoall_async(
    tensor: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall, and return its handle.

    ``splits[r]`` rows are sent to rank r of the process set; without ``splits``, all ranks get equally many. The result
    is a pair: the rows that this rank received, and how many of them came from each rank.
    """
    return _ops.alltoall_async(tensor, splits, name=name, process_set=process_set)


def alltoall(
    tensor: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Run ``alltoall_async`` and wait for it.

    Returns the rows that this rank received. If ``splits`` is given, returns the pair that is the result of
    ``alltoall_async``.
    """
    output, received = alltoall_async(tensor, splits, name, process_set).wait()
    return output if splits is None else (output, received)


def reducescatter_async(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = "none",
) -> Handle:
    """Start a reducescatter, and return its handle. The result is this rank's rows of the reduced array."""
    return _ops.reducescatter_async(
        tensor,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
    )


def reducescatter(tensor: Array, *args: Any, **kwargs: Any) -> Array:
    """Run ``reducescatter_async`` with these arguments, wait for it, and return its result."""
    return reducescatter_async(tensor, *args, **kwargs).wait()


def grouped_reducescatter_async(
    tensors: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = "none",
) -> Handle:
    """Start a reducescatter of several arrays; none is reduced before all are ready. Return its handle."""
    return _ops.grouped_reducescatter_async(
        tensors,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
    )


def grouped_reducescatter(tensors: Sequence[Array], *args: Any, **kwargs: Any) -> list[Array]:
    """Run ``grouped_reducescatter_async`` with these arguments, wait for it, and return its result."""
    return list(grouped_reducescatter_async(tensors, *args, **kwargs).wait())
