"""Runs collectives eagerly or in a graph, with gradients.

The gradient of a collective is computed by a collective too, so all members of the process set must compute it. The
rules for the gradients are those of Horovod; ``ddlcore.api.CollectiveCall`` lists them. Minimum, maximum and product
have no gradient, and raise an error when a gradient is requested. Tensors of integers have no gradient either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from ddl_tf import present
from ddl_tf.adapter import TfAdapter, brought
from ddl_tf.devices import tell_of_graphs
from ddl_tf.errors import translating
from ddl_tf.graph import asynchronous, wire_name
from ddlcore.api import CollectiveCall, Operations, current_job
from ddlcore.contracts import JobService
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average, Sum

ADAPTER = TfAdapter()
OPERATIONS = Operations(ADAPTER)

Tensors = Sequence[Any]


def running(job: JobService) -> JobService:
    """Return ``job``, or the current job if ``job`` has ended.

    A graph needs this because it may outlive the job in which it was built.
    """
    return current_job() if job.closed else job


@dataclass(frozen=True)
class Call(CollectiveCall):
    """The arguments that the forward and the backward collective share.

    In a graph, all runs of the graph share them too.
    """

    stage_on_host: bool = False  # the user requested that tensors on a GPU be staged on the host

    advice: ClassVar[str] = "use tf.stop_gradient(tensor), or Average or Sum"

    def named(self, verb: str) -> Call:
        """Return the same call with the name that messages between ranks use. ``verb`` is a part of that name.

        An eager call without a name stays without a name: such calls are matched by their order.
        """
        return self if tf.executing_eagerly() else replace(self, name=wire_name(verb, self.name))

    def plain(self) -> dict[str, Any]:
        """Return the keyword arguments of an operation that only moves data.

        The item ``job`` is the job that is current when the graph runs.
        """
        return {**super().plain(), "job": running(self.job)}


def allreduce(call: Call, tensors: Tensors, *, grouped: bool = False) -> list[Any]:
    """Run the allreduce that ``call`` describes on all ``tensors``, and return the reduced tensors.

    If ``grouped`` is true, the tensors are reduced as one group and become ready together. Otherwise ``tensors`` has
    one item.
    """
    call = call.named("Allreduce")

    def run(*given: Any) -> Tensors:
        if grouped:
            together: list[Any] = OPERATIONS.grouped_allreduce_async(given, waits=True, **call.reduction()).wait()
            return together
        return [OPERATIONS.allreduce_async(given[0], waits=True, **call.reduction()).wait()]

    def forward(*given: Any) -> list[Any]:
        return _carried_out(call, run, given, [tensor.shape for tensor in given], "DdlAllreduce")

    def backward(gradients: Tensors, given: Tensors) -> Tensors:
        call.check_differentiable("allreduce")
        return allreduce(call.backward(), gradients, grouped=grouped)

    return _differentiable(forward, backward, tensors)


def allgather(call: Call, tensors: Tensors, *, grouped: bool = False) -> list[Any]:
    """Return, for each of ``tensors``, the rows of all members of the process set, joined in rank order.

    If ``grouped`` is true, the tensors are gathered as one group and become ready together. Otherwise ``tensors`` has
    one item.
    """
    call = call.named("Allgather")

    def run(*given: Any) -> Tensors:
        if grouped:
            together: list[Any] = OPERATIONS.grouped_allgather_async(given, waits=True, **call.plain()).wait()
            return together
        return [OPERATIONS.allgather(given[0], **call.plain())]

    def forward(*given: Any) -> list[Any]:
        return _carried_out(call, run, given, [_any_rows(tensor) for tensor in given], "DdlAllgather")

    def backward(gradients: Tensors, given: Tensors) -> Tensors:
        mine = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in given])
        (everyones,) = allgather(call.more("rows"), [mine[tf.newaxis]])  # (set size, tensors)
        before = tf.reduce_sum(everyones[: present.set_rank(call.process_set, everyones)], 0)
        reduced = allreduce(call.more("grad", op=Average), gradients, grouped=grouped)
        return [g[before[i] : before[i] + mine[i]] for i, g in enumerate(reduced)]

    return _differentiable(forward, backward, tensors)


def broadcast(call: Call, tensor: Any, root_rank: int) -> Any:
    """Return a new tensor with the values that ``tensor`` has on ``root_rank``.

    ``root_rank`` is a rank of the world, even within a process set.
    """
    call = call.named("Broadcast")

    def run(*given: Any) -> Tensors:
        return [OPERATIONS.broadcast(given[0], root_rank, **call.plain())]

    def forward(*given: Any) -> list[Any]:
        return _carried_out(call, run, given, [given[0].shape], "DdlBroadcast")

    def backward(gradients: Tensors, given: Tensors) -> Tensors:
        (reduced,) = allreduce(call.more("grad", op=Average), gradients)
        if present.changes():
            is_root = tf.equal(present.world_rank(reduced), root_rank)
            return [tf.where(is_root, reduced, tf.zeros_like(reduced))]
        if call.job.rank == root_rank:
            return [reduced]
        with tf.control_dependencies([reduced]):  # otherwise a session would drop the allreduce on this rank
            return [tf.identity(tf.zeros_like(gradients[0]))]

    return _differentiable(forward, backward, [tensor])[0]


def alltoall(call: Call, tensor: Any, splits: Any) -> tuple[Any, Any]:
    """Return the rows that were sent to this member, and an int32 tensor with the number of rows from each member.

    ``splits`` is a tensor with the number of rows to send to each member, or None to send the same number to each.
    """
    call = call.named("Alltoall")

    def run(*given: Any) -> Tensors:
        parts = None if splits is None else [int(rows) for rows in np.asarray(given[1])]
        rows, received = OPERATIONS.alltoall(given[0], parts, **call.plain())
        return [rows, np.asarray(received, np.int32)]

    def forward(*given: Any) -> list[Any]:
        shapes = [_any_rows(given[0]), tf.TensorShape([None if present.changes() else len(call.members())])]
        return _carried_out(call, run, given, shapes, "DdlAlltoall", also=(tf.int32,))

    def differentiable(*given: Any) -> tuple[list[Any], Callable[..., Any]]:
        outputs = forward(*given)

        def gradient(rows: Any, _: Any = None) -> list[Any]:
            back = alltoall(call.backward(), tf.convert_to_tensor(rows), outputs[1])[0]
            return [back, *[None] * (len(given) - 1)]

        return outputs, gradient

    given = [tensor] if splits is None else [tensor, splits]
    plain = not _has_gradient(tensor) or (tf.executing_eagerly() and not _is_watched(given))
    rows, received = forward(*given) if plain else _with_gradient(differentiable)(*given)
    return rows, received


def reducescatter(call: Call, tensors: Tensors, *, grouped: bool = False) -> list[Any]:
    """Reduce ``tensors`` over all members of the process set, and return this member's rows of each reduced tensor.

    If ``grouped`` is true, the tensors are reduced as one group and become ready together. Otherwise ``tensors`` has
    one item.
    """
    call = call.named("Reducescatter")

    def run(*given: Any) -> Tensors:
        if grouped:
            together: list[Any] = OPERATIONS.grouped_reducescatter_async(given, waits=True, **call.reduction()).wait()
            return together
        return [OPERATIONS.reducescatter(given[0], **call.reduction())]

    def forward(*given: Any) -> list[Any]:
        return _carried_out(call, run, given, [_any_rows(tensor) for tensor in given], "DdlReducescatter")

    def backward(gradients: Tensors, given: Tensors) -> Tensors:
        call.check_differentiable("reducescatter")
        factor = call.prescale_factor * call.postscale_factor
        members = present.count_of_members(call.process_set, gradients[0]) if call.op == Sum else 1
        scaled = [
            gradient * tf.cast(factor, gradient.dtype) * tf.cast(members, gradient.dtype) for gradient in gradients
        ]
        return allgather(call.backward(), scaled, grouped=grouped)

    return _differentiable(forward, backward, tensors)


# --- shared


@translating
def _carried_out(
    call: Call,
    run: Callable[..., Tensors],
    tensors: Tensors,
    shapes: Sequence[Any],
    label: str,
    also: Sequence[Any] = (),
) -> list[Any]:
    """Call ``run`` with ``tensors`` and return its outputs: now in eager mode, or each time the current graph runs.

    The outputs have the types of ``tensors``, followed by the types in ``also``. ``shapes`` are the static shapes of
    the outputs in a graph. ``label`` is the operation's name in the graph.
    """
    if tf.executing_eagerly():
        outputs = run(*brought(ADAPTER, running(call.job), tensors, call.stage_on_host))
        return [output if isinstance(output, tf.Tensor) else tf.constant(output) for output in outputs]
    dtypes = [tensor.dtype for tensor in tensors[: len(shapes) - len(also)]] + list(also)
    tell_of_graphs()
    return asynchronous(run, tensors, dtypes, shapes, label)


def _any_rows(tensor: Any) -> Any:
    """Return the tensor's static shape with an unknown first dimension. Raises ValueError for a scalar."""
    if tensor.shape.rank == 0:
        raise InvalidArgument("a tensor with at least one dimension is needed; reshape the scalar to (1,)")
    return tensor.shape if tensor.shape.rank is None else tf.TensorShape([None]).concatenate(tensor.shape[1:])


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    wrapped: Callable[..., Any] = tf.custom_gradient(function)
    return wrapped


def _is_watched(tensors: Tensors) -> bool:
    """Return whether a gradient tape may later request gradients for ``tensors``.

    TensorFlow has no public function for this. Without the check, each call would cost 0.1 ms more in TensorFlow.
    """
    tells = getattr(record, "should_record_backprop", None)
    return tells is None or bool(tells(tensors))


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _differentiable(
    forward: Callable[..., list[Any]], backward: Callable[[Tensors, Tensors], Tensors], tensors: Tensors
) -> list[Any]:
    """Return ``forward(*tensors)``. Its gradient for tensors of floats is ``backward(gradients, tensors)``.

    Complex tensors have a gradient, too; tensors of other types have none.
    """
    floats = [i for i, tensor in enumerate(tensors) if _has_gradient(tensor)]
    if not floats or (tf.executing_eagerly() and not _is_watched(tensors)):
        return forward(*tensors)

    def differentiable(*given: Any) -> tuple[list[Any], Callable[..., Any]]:
        def gradient(*gradients: Any) -> list[Any]:
            dense = [tf.convert_to_tensor(gradients[i]) for i in floats]
            results: list[Any] = [None] * len(given)
            for i, result in zip(floats, backward(dense, [given[i] for i in floats])):
                results[i] = result
            return results

        return forward(*given), gradient

    return list(_with_gradient(differentiable)(*tensors))
