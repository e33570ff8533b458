"""The eight functions that make an allreduce of torch tensors.

A function reduces one tensor or a group of tensors; its result is in new tensors or in the given ones; it waits for the
result or returns a handle. The names of the functions and the order of their arguments are Horovod's. What ops.py says
about all collectives is also true for these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddl_torch import autograd
from ddl_torch.autograd import OPERATIONS, Call
from ddl_torch.compression import Compression
from ddl_torch.memory import hold_memory, mark_written, mark_written_by
from ddl_torch.weighted import weighted, weighted_now
from ddlcore.api import ProcessSet, Waitable, current_job, global_process_set, resolve_op, wire_compression
from ddlcore.errors import DdlInternalError
from ddlcore.types import ReduceOp


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> torch.Tensor:
    """Return a new tensor: ``postscale_factor * op(prescale_factor * every member's tensor)``. It is differentiable.

    ``weight`` is what this rank's values count for in an average, which is then sum(weight * tensor) / sum(weight): a
    number, such as that of this rank's tokens, or a ``Share``. All members must pass one, of the same kind. If the
    numbers of all members are 0, all of them raise InvalidArgument. So does a member at once for a weight that is
    negative, infinite, NaN or no number, and for a weight together with another op, factors, or integers.
    ``synchronize`` waits for the device if a number is the weight of a device's tensors.
    """
    wire, user = wire_compression(compression)
    reduce_op = resolve_op(op, average)
    call = Call(current_job(), process_set, name, reduce_op, prescale_factor, postscale_factor, wire)
    if weight is not None:
        return weighted_now(call, [tensor], weight, user)[0]
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
    weight: Any = None,
) -> Waitable:
    """Start an allreduce and return a handle; ``synchronize(handle)`` returns the new, reduced tensor.

    ``tensor`` is only read, but the caller must not change it before ``synchronize`` has returned.
    """
    if weight is not None:
        how = (name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        return weighted([tensor], None, True, weight, *how)
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
    weight: Any = None,
) -> torch.Tensor:
    """Reduce ``tensor`` in place, and return it."""
    if weight is not None:
        how = (name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        weighted([tensor], [tensor], True, weight, *how).wait()
        return tensor
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
        mark_written([tensor])  # a part of it may have been written
        raise
    mark_written([tensor])
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Waitable:
    """Start to reduce ``tensor`` in place and return a handle; ``synchronize(handle)`` returns ``tensor``.

    The caller must neither read nor write ``tensor`` before ``synchronize`` has returned. ``tensor`` cannot be resized
    any more, as after ``tensor.numpy()``.
    """
    if weight is not None:
        how = (name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        return weighted([tensor], [tensor], True, weight, *how)
    hold_memory([tensor])
    handle = OPERATIONS.allreduce_async(
        tensor,
        output=tensor,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return mark_written_by(handle, [tensor])


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> list[torch.Tensor]:
    """Reduce all ``tensors`` as one group, and return the results as a list of new tensors.

    None of the tensors is reduced before all members have submitted all of them. ``weight``: see ``allreduce``.
    """
    wire, user = wire_compression(compression)
    reduce_op = resolve_op(op, average)
    call = Call(current_job(), process_set, name, reduce_op, prescale_factor, postscale_factor, wire)
    if weight is not None:
        return weighted_now(call, tensors, weight, user)
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
    weight: Any = None,
) -> Waitable:
    """Start a grouped allreduce and return a handle; ``synchronize(handle)`` returns the list of new tensors."""
    if weight is not None:
        how = (name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        return weighted(tensors, None, False, weight, *how)
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
    weight: Any = None,
) -> list[torch.Tensor]:
    """Reduce all ``tensors`` in place as one group, and return them as a list."""
    if weight is not None:
        how = (name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        reduced: list[torch.Tensor] = weighted(tensors, tensors, False, weight, *how).wait()
        return reduced
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
    weight: Any = None,
) -> Waitable:
    """Start to reduce ``tensors`` in place and return a handle; ``synchronize(handle)`` returns ``tensors`` as a list.

    The tensors cannot be resized any more, as after ``tensor.numpy()``.
    """
    if weight is not None:
        how = (name, resolve_op(op, average), prescale_factor, postscale_factor, process_set)
        return weighted(tensors, tensors, False, weight, *how)
    reduce_op = resolve_op(op, average)
    hold_memory(tensors)
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
    return mark_written_by(handle, tensors)
