"""The collectives for numpy arrays, with the same arguments as in Horovod.

``import ddlcore`` offers these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlcore.api.operations import Operations
from ddlcore.api.process_set import ProcessSet, global_process_set
from ddlcore.api.weighted import weighted_average_async
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


class _Arithmetic:
    """What an average with weights computes with numpy arrays, see ``Arithmetic``."""

    def multiplied(self, tensor: Array, factor: float, wide: bool) -> Array:
        if factor == 0.0:
            return np.zeros(tensor.shape, np.float32 if wide else tensor.dtype)
        array = tensor.astype(np.float32) if wide else tensor
        return array * array.dtype.type(factor)

    def number(self, value: float, like: Array) -> Array:
        return np.array([value], np.float64)

    def value(self, number: Array) -> float:
        return float(number[0])

    def result(self, total: Array, factor: float, like: Array) -> Array:
        return (total * total.dtype.type(factor)).astype(like.dtype, copy=False)


def _place(outputs: Sequence[Array], averages: Sequence[Array]) -> None:
    for output, average in zip(outputs, averages, strict=True):
        output[...] = average


_weighted = partial(weighted_average_async, _ops, _Arithmetic(), _place)


def allreduce_async(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
    weight: Any = None,
) -> Handle:
    """Start an allreduce of the ranks' arrays with ``op``, and return its handle. The result is a new array.

    ``prescale_factor`` multiplies the values before the reduction, and ``postscale_factor`` the result after it.
    ``weight`` is what this rank's values count for in an average, which is then sum(weight * tensor) / sum(weight): a
    number (the handle raises InvalidArgument on all ranks if it is 0 on all of them), or a ``Share``. All ranks must pass
    one, of the same kind. Raises InvalidArgument for a weight that is negative, infinite, NaN or no number, and for a
    weight together with another op, with factors, or with arrays that are not of floating point.
    """
    if weight is not None:
        how = (name, op, prescale_factor, postscale_factor, process_set, compression)
        return _weighted([tensor], None, True, weight, *how)
    return _start(tensor, None, False, name, op, prescale_factor, postscale_factor, process_set, compression)


def allreduce_async_(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = "none",
    weight: Any = None,
) -> Handle:
    """Start an allreduce that writes its result to ``tensor``, and return its handle.

    With a ``weight``, ``tensor`` has the result when ``synchronize`` has returned.
    """
    if weight is not None:
        how = (name, op, prescale_factor, postscale_factor, process_set, compression)
        return _weighted([tensor], [tensor], True, weight, *how)
    return _start(tensor, tensor, False, name, op, prescale_factor, postscale_factor, process_set, compression)


def allreduce(tensor: Array, *args: Any, **kwargs: Any) -> Array:
    """Run ``allreduce_async`` with these arguments, wait for it, and return its result."""
    if len(args) > 6 or kwargs.get("weight") is not None:
        return allreduce_async(tensor, *args, **kwargs).wait()
    kwargs.pop("weight", None)
    return _start(tensor, None, True, *args, **kwargs).wait()


def allreduce_(tensor: Array, *args: Any, **kwargs: Any) -> Array:
    """Call ``allreduce_async_`` with these arguments, wait for the operation, and return ``tensor``."""
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
    weight: Any = None,
) -> None:
    if weight is not None:
        how = (name, op, prescale_factor, postscale_factor, process_set, compression)
        _weighted([tensor], [tensor], True, weight, *how).wait()
        return
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
    weight: Any = None,
) -> Handle:
    """Start an allreduce of each of several arrays, and return one handle.

    The result of the handle is a list of new arrays. ``weight``: see ``allreduce_async``.
    """
    if weight is not None:
        how = (name, op, prescale_factor, postscale_factor, process_set, compression)
        return _weighted(tensors, None, False, weight, *how)
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
    weight: Any = None,
) -> Handle:
    """Start an allreduce of each of several arrays in place, and return one handle. Its result is ``tensors``.

    No array is reduced before all are ready. ``weight``: see ``allreduce_async``.
    """
    if weight is not None:
        how = (name, op, prescale_factor, postscale_factor, process_set, compression)
        return _weighted(tensors, tensors, False, weight, *how)
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
    """Call ``grouped_allreduce_async`` with these arguments, wait for the operation, and return the new arrays."""
    return list(grouped_allreduce_async(tensors, *args, **kwargs).wait())


def grouped_allreduce_(tensors: Sequence[Array], *args: Any, **kwargs: Any) -> list[Array]:
    """Call ``grouped_allreduce_async_`` with these arguments, wait for the operation, and return ``tensors``."""
    return list(grouped_allreduce_async_(tensors, *args, **kwargs).wait())


def allgather_async(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an allgather, and return its handle. The result is all arrays concatenated in the order of the ranks.

    The arrays are concatenated along the first dimension. They may differ between ranks only in the size of the first
    dimension.
    """
    return _ops.allgather_async(tensor, name=name, process_set=process_set)


def allgather(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Call ``allgather_async``, wait for the operation, and return its result, the concatenated array."""
    return _ops.allgather(tensor, name=name, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather of each of several arrays, and return one handle. Its result is a list of new arrays.

    No array is gathered before all of the arrays are ready on all ranks. See ``allgather_async``.
    """
    return _ops.grouped_allgather_async(tensors, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Call ``grouped_allgather_async``, wait for the operation, and return its result, a list of new arrays."""
    return list(_ops.grouped_allgather_async(tensors, name=name, process_set=process_set, waits=True).wait())


def broadcast_async(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast of the array of ``root_rank``, a rank of the world. Return its handle.

    The result of the handle is a new array.
    """
    return _ops.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Call ``broadcast_async``, wait for the operation, and return its result, a new array."""
    return _ops.broadcast(tensor, root_rank, name=name, process_set=process_set)


def broadcast_async_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast of the array of ``root_rank``, a rank of the world, into ``tensor``. Return its handle."""
    return _ops.broadcast_async(tensor, root_rank, output=tensor, name=name, process_set=process_set)


def broadcast_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Call ``broadcast_async_``, wait for the operation, and return ``tensor``."""
    return _ops.broadcast(tensor, root_rank, output=tensor, name=name, process_set=process_set)


def alltoall_async(
    tensor: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall, and return its handle: ``splits[r]`` rows of ``tensor`` are sent to rank r of the process set.

    ``splits``: None means that this rank sends equally many rows to all ranks. The result is a pair: the rows that this
    rank has received, and a list with the number of rows from each rank.
    """
    return _ops.alltoall_async(tensor, splits, name=name, process_set=process_set)


def alltoall(
    tensor: Array,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Call ``alltoall_async`` with these arguments, wait for the operation, and return its result.

    The result depends on ``splits``. If ``splits`` is None, it is only the rows that this rank has received. If
    ``splits`` is given, it is a pair: these rows, and a list with the number of rows from each rank.
    """
    output, received = _ops.alltoall(tensor, splits, name=name, process_set=process_set)
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
    """Start a reducescatter, and return its handle. The result is this rank's part of the rows of the reduced array.

    The other arguments are the same as in ``allreduce_async``.
    """
    how = (name, op, process_set, prescale_factor, postscale_factor, compression)
    handle: Handle = _scatter(partial(_ops.reducescatter_async, tensor), *how)
    return handle


def reducescatter(tensor: Array, *args: Any, **kwargs: Any) -> Array:
    """Call ``reducescatter_async`` with these arguments, wait for the operation, and return its result, a new array."""
    return _scatter(partial(_ops.reducescatter, tensor), *args, **kwargs)


def grouped_reducescatter_async(
    tensors: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = "none",
) -> Handle:
    """Start a reducescatter of each of several arrays, and return one handle. Its result is a list of new arrays.

    No array is reduced before all of the arrays are ready on all ranks. See ``reducescatter_async``.
    """
    how = (name, op, process_set, prescale_factor, postscale_factor, compression)
    handle: Handle = _scatter(partial(_ops.grouped_reducescatter_async, tensors), *how)
    return handle


def grouped_reducescatter(tensors: Sequence[Array], *args: Any, **kwargs: Any) -> list[Array]:
    """Call ``grouped_reducescatter_async`` with these arguments, wait for the operation, and return the new arrays."""
    return list(_scatter(partial(_ops.grouped_reducescatter_async, tensors, waits=True), *args, **kwargs).wait())


def _scatter(
    call: Callable[..., Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: str = "none",
) -> Any:
    """Make ``call`` with these arguments, whose order is that of ``reducescatter``."""
    return call(
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        compression=compression,
    )
