"""Offers the collectives for TensorFlow tensors, with Horovod's names and argument orders.

Each function is a collective: all members of ``process_set`` must call it with the same name. Calls without a name must
be made in the same order on all members (in a graph, they must be built in the same order). Any thread may call the
functions, and the results belong to the caller. The functions work eagerly, in ``tf.function`` and in the graphs of
sessions, and are differentiable. Wrong arguments raise ValueError immediately. Errors of a running job derive from
DdlInternalError. These errors are also instances of TensorFlow's error classes; ddl_tf.errors lists the classes.
``root_rank`` is a rank of the world, even within a process set. If ``device_dense`` or ``device_sparse`` is a name of
the host, such as '/cpu:0', tensors on a GPU are staged on the host. ``ignore_name_scope`` is accepted for compatibility
with Horovod and has no effect, because names in messages never contain a scope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from ddl_tf import autograd, present
from ddl_tf.autograd import Call, running
from ddl_tf.averages import average_of_slices
from ddl_tf.compression import Compression
from ddl_tf.devices import check_device, is_host
from ddl_tf.errors import translating
from ddl_tf.graph import ordered
from ddlcore import api
from ddlcore.api import (
    ProcessSet,
    UserCompressor,
    current_job,
    global_process_set,
    resolve_op,
    wire_compression,
)
from ddlcore.contracts import JobService
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, Sum

F = TypeVar("F", bound=Callable[..., Any])


def _verb(function: F) -> F:
    """Wrap ``function`` so that its errors are also TensorFlow errors, and exclude it from AutoGraph."""
    return cast(F, tf.autograph.experimental.do_not_convert(translating(function)))


# --- allreduce


@_verb
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return a new tensor: ``postscale_factor * op(prescale_factor * tensor)``, where ``op`` reduces over all members.

    The result for tf.IndexedSlices is tf.IndexedSlices with the rows and indices of all members, joined in rank order.
    tf.IndexedSlices support only Average and Sum, without scale factors. An average of integers is truncated toward
    zero and keeps the integer type. In the average of integer IndexedSlices, each index occurs once. ``average`` is
    Horovod's older argument for ``op``: True for Average, False for Sum.
    """
    wire, user = _understood(compression, device_dense, device_sparse)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, name, resolve_op(op, average), *scales, wire, is_host(device_dense))
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse(replace(call, stage_on_host=is_host(device_sparse)), tensor)
    return _compressed(user, [tensor], lambda packed: autograd.allreduce(call, packed))[0]


@_verb
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce all ``tensors`` as one group, and return the results as a list of new tensors.

    No tensor of the group is reduced before every member has submitted all tensors of the group. tf.IndexedSlices in
    the list are not part of the group: they are reduced one by one, as in ``allreduce``.
    """
    wire, user = _understood(compression, device_dense, device_sparse)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, name, resolve_op(op, average), *scales, wire, is_host(device_dense))
    results = _listed(tensors)
    slices = [i for i, tensor in enumerate(results) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in slices]
    if dense or not slices:
        reduced = _compressed(
            user, [results[i] for i in dense], lambda packed: autograd.allreduce(call, packed, grouped=True)
        )
        for i, result in zip(dense, reduced):
            results[i] = result
    for i in slices:
        results[i] = _sparse(call.more(str(i), stage_on_host=is_host(device_sparse)), results[i])
    return results


def _sparse(call: Call, tensor: Any) -> Any:
    if call.op not in (Average, Sum):
        raise NotImplementedError(
            f"op={call.op.name} has no meaning for tf.IndexedSlices; use Average or Sum, or tf.convert_to_tensor(slices)"
        )
    if (call.prescale_factor, call.postscale_factor) != (1.0, 1.0):
        raise NotImplementedError(
            "prescale_factor and postscale_factor are not supported for tf.IndexedSlices; scale the values yourself, "
            "or pass tf.convert_to_tensor(slices)"
        )
    values, indices = autograd.allgather(call, [tensor.values, tensor.indices], grouped=True)
    if call.op is Average:
        values, indices = average_of_slices(values, indices, present.count_of_members(call.process_set, values))
    return tf.IndexedSlices(values, indices, dense_shape=tensor.dense_shape)


# --- allgather


@_verb
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all members, joined along the first dimension in rank order.

    The tensors may differ in the size of the first dimension only.
    """
    return autograd.allgather(Call(current_job(), process_set, name), _tensors([tensor]))[0]


@_verb
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return a list with the result of ``allgather`` for each of ``tensors``.

    All tensors are gathered as one operation.
    """
    return autograd.allgather(Call(current_job(), process_set, name), _tensors(_listed(tensors)), grouped=True)


# --- broadcast


@_verb
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a new tensor with the values that ``tensor`` has on ``root_rank``."""
    call = Call(current_job(), process_set, name)
    if root_rank not in call.members():
        raise InvalidArgument(f"broadcast: root_rank={root_rank} is not a member of {process_set}")
    return autograd.broadcast(call, _tensors([tensor])[0], root_rank)


# --- alltoall


@_verb
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to each member r, and return the rows that this member receives.

    Without ``splits``, every member is sent the same number of rows. The received rows are ordered by the rank of the
    sender. With ``splits``, this function returns a tuple: the rows, and an int32 tensor with the number of rows
    received from each member.
    """
    if splits is not None:
        splits = tf.convert_to_tensor(np.asarray(splits) if isinstance(splits, (list, tuple)) else splits)
        if splits.shape.rank not in (1, None) or not splits.dtype.is_integer:
            raise InvalidArgument(
                "alltoall: splits must be a one-dimensional tensor of integers, one a rank, "
                f"not {splits.dtype.name} of shape {splits.shape}"
            )
    rows, received = autograd.alltoall(Call(current_job(), process_set, name), _tensors([tensor])[0], splits)
    return rows if splits is None else (rows, received)


# --- reducescatter


@_verb
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce ``tensor`` over all members, and return this member's rows of the reduced tensor.

    If the rows cannot be divided equally, the first members get one row more than the other members.
    """
    wire, user = _understood(compression, device_dense)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, name, resolve_op(op), *scales, wire, is_host(device_dense))
    return _compressed(user, [tensor], lambda packed: autograd.reducescatter(call, packed))[0]


@_verb
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return a list with the result of ``reducescatter`` for each of ``tensors``.

    All tensors are reduced as one operation.
    """
    wire, user = _understood(compression, device_dense)
    scales = (prescale_factor, postscale_factor)
    call = Call(current_job(), process_set, None, resolve_op(op), *scales, wire, is_host(device_dense))
    return _compressed(user, _listed(tensors), lambda packed: autograd.reducescatter(call, packed, grouped=True))


# --- without a tensor


@_verb
def join(device: int = -1) -> Any:
    """Declare that this rank has no more data, and wait until all ranks have joined.

    Returns the rank that joined last, as an int32 scalar. During the wait, this rank takes part in the other ranks'
    operations with values that do not change the results.
    """
    return _scalar(lambda job: api.join(device, job=job), "DdlJoin", waits=True)


@_verb
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Wait until every member of the process set has called this function.

    In eager mode, this function returns None. In a graph, it returns an int32 scalar, which is ready when every member
    has run the operation.
    """

    def value(job: JobService) -> int:
        api.barrier(process_set, job)
        return 0

    result = _scalar(value, "DdlBarrier", waits=True)
    return None if tf.executing_eagerly() else result


@_verb
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks in the process set as an int32 scalar. A graph reads the number each time it runs."""
    return _scalar(lambda job: len(_members(job, process_set_id)), name or "DdlSize")


@_verb
def rank_op(name: str | None = None) -> Any:
    """Return this process's rank as an int32 scalar. A graph reads the rank each time it runs."""
    return _scalar(lambda job: job.rank, name or "DdlRank")


@_verb
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host as an int32 scalar. A graph reads the number each time it runs."""
    return _scalar(lambda job: job.local_size, name or "DdlLocalSize")


@_verb
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's local rank, its number among the ranks of its host, as an int32 scalar.

    A graph reads the local rank each time it runs.
    """
    return _scalar(lambda job: job.local_rank, name or "DdlLocalRank")


@_verb
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is a member of the process set, otherwise 0, as an int32 scalar.

    A graph checks the membership each time it runs.
    """
    return _scalar(lambda job: int(job.rank in _members(job, process_set_id)), name or "DdlProcessSetIncluded")


def _members(job: JobService, process_set_id: int) -> tuple[int, ...]:
    members = job.members(process_set_id)
    if members is None:
        raise InvalidArgument(
            f"process set {process_set_id} is not registered in this job; call add_process_set() first"
        )
    return members


def _scalar(value: Callable[[JobService], int], label: str, *, waits: bool = False) -> Any:
    """Return the int32 scalar ``value(job)``, computed now in eager mode, or each time the current graph runs.

    ``waits``: whether ``value`` may block; if so, a graph runs it in order with other operations. ``label``: the
    operation's name in the graph.
    """
    built_in = current_job()
    if tf.executing_eagerly():
        return tf.constant(value(built_in), tf.int32)

    def run(*_: Any) -> list[Any]:
        return [np.asarray(value(running(built_in)), np.int32)]

    if waits:
        return ordered(run, [], [tf.int32], label)[0]
    (result,) = tf.numpy_function(run, [], [tf.int32], name=label)
    result.set_shape([])
    return result


# --- shared


def _understood(compression: Any, *devices: str) -> tuple[str, UserCompressor | None]:
    for device, argument in zip(devices, ("device_dense", "device_sparse")):
        check_device(device, argument)
    return wire_compression(compression)


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [tf.convert_to_tensor(value) for value in values]


def _listed(tensors: Any) -> list[Any]:
    """Return the tensors of a group as a list. Raises ValueError if the list is empty or contains None."""
    if isinstance(tensors, tf.Tensor):
        raise InvalidArgument("a grouped operation takes a list of tensors, not one tensor")
    listed = list(tensors)
    if not listed:
        raise InvalidArgument("a grouped operation takes a list of tensors; this one is empty")
    missing = [i for i, tensor in enumerate(listed) if tensor is None]
    if missing:
        raise InvalidArgument(f"entry {missing[0]} of the list of tensors is None; leave it out on every rank")
    return listed


def _compressed(
    user: UserCompressor | None, values: Sequence[Any], carry_out: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Call ``carry_out`` with ``values``, converted to tensors, and return its results.

    ``user`` is the user's own compressor. If it is not None, it compresses the tensors before the call and decompresses
    the results.
    """
    tensors = _tensors(values)
    if user is None:
        return carry_out(tensors)
    pairs = [user.compress(tensor) for tensor in tensors]
    results = carry_out([packed for packed, _ in pairs])
    return [user.decompress(tensor, ctx) for tensor, (_, ctx) in zip(results, pairs)]
