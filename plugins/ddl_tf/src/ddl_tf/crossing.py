"""Adds operations to a graph. The operations pass gradients to Python and return the results to the graph.

This module knows neither collectives nor variables. Gradients in host memory are passed as arrays. Gradients on a GPU
are passed as eager tensors, which ``py_function`` makes without a copy. The operations that pass gradients to Python do
not block. One more operation, which runs on the host (``graph.asynchronous``), waits for all results. Results on a GPU
are stored until another operation on that GPU, which runs after the wait, returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ddl_tf.buckets import GradientBucket, GradientLook
from ddl_tf.devices import HOST
from ddl_tf.exchange import TOKEN
from ddl_tf.graph import asynchronous

LABEL = "DdlGradients"


def depart(function: Callable[..., Any], first: int, tensors: Sequence[Any]) -> Any:
    """Add to the graph an operation that passes ``tensors`` to Python as arrays. Return the operation's token.

    When the operation runs, it calls ``function(first, *arrays)``. The token is an output of the operation, so other
    operations can depend on it.
    """
    with tf.device(HOST):
        return _independent(tf.numpy_function(partial(function, first), tensors, tf.int32))


def lift(function: Callable[..., None], first: int, tensors: Sequence[Any], gpu: str) -> Any:
    """Add to the graph an operation that passes tensors on a GPU to Python as eager tensors. Return the operation.

    When the operation runs, it calls ``function(first, *tensors)``. The operation has no output. ``gpu`` is
    TensorFlow's name of the GPU.
    """
    with tf.device(gpu):
        operation = tf.py_function(partial(function, first), tensors, [])
    return _independent(operation)


def arrive(
    take: Callable[[], list[Any]],
    tokens: Sequence[Any],
    lifted: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    gpus: Sequence[str],
) -> list[Any]:
    """Add operations that call ``take`` after all tensors have been sent, and return the outputs of these operations.

    ``take`` waits for the results and returns them. Output i is the i-th result. ``tokens`` and ``lifted`` are the
    return values of ``depart`` and ``lift``. ``dtypes`` and ``shapes`` describe the outputs. Output i is on the GPU
    named ``gpus[i]``, or on the host if that name is empty.
    """
    if not any(gpus):
        return asynchronous(lambda *_: take(), tokens, dtypes, shapes, LABEL)
    here = [number for number, gpu in enumerate(gpus) if not gpu]
    landed: dict[int, Any] = {}  # filled only between the two operations of one run

    def wait(*_: Any) -> list[Any]:
        results = take()
        landed.clear()  # an earlier run may have failed after its wait
        landed.update((number, results[number]) for number, gpu in enumerate(gpus) if gpu)
        return [results[number] for number in here] or [TOKEN]

    with tf.control_dependencies(lifted):
        kinds = [dtypes[number] for number in here] or [tf.int32]
        arrived = asynchronous(wait, tokens, kinds, [shapes[number] for number in here] or [[]], LABEL)
    results: list[Any] = [None] * len(gpus)
    for number, whole in zip(here, arrived):
        results[number] = whole
    for gpu in dict.fromkeys(gpu for gpu in gpus if gpu):
        numbers = [number for number, place in enumerate(gpus) if place == gpu]
        with tf.device(gpu), tf.control_dependencies([arrived[0].op]):
            wholes = tf.py_function(partial(_hand_out, landed, numbers), [], [dtypes[number] for number in numbers])
        _independent(wholes[0].op)
        for number, whole in zip(numbers, wholes, strict=True):
            whole.set_shape(shapes[number])
            results[number] = whole
    return results


def _hand_out(landed: dict[int, Any], numbers: Sequence[int]) -> list[Any]:
    try:
        return [landed.pop(number) for number in numbers]
    except KeyError:
        raise ValueError(f"{LABEL} has begun again before it ended; let one thread at a time run the graph") from None


def _independent(output: Any) -> Any:
    """Return ``output``, and remove its operation from the automatic order of a ``tf.function``.

    In the automatic order, TensorFlow would run such operations as they were traced, and the order of tracing may
    differ between ranks.
    """
    graph = tf.compat.v1.get_default_graph()
    independently = getattr(getattr(graph, "experimental_acd_manager", None), "run_independently", None)
    if independently is not None:
        independently(getattr(output, "op", output))
    return output


# --- buckets


def join(members: Sequence[Any], bucket: GradientBucket) -> Any:
    """Return the tensor of shape (rows, *inner) that is sent for the gradients ``members`` of ``bucket``."""
    if bucket.inner is None:
        return members[0]
    parts = [m if m.shape.rank == 1 + len(bucket.inner) else tf.reshape(m, [-1]) for m in members]
    return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


def split(whole: Any, bucket: GradientBucket, members: Sequence[Any]) -> list[Any]:
    """Split ``whole``, a reduced bucket, into one result for each of ``members``, in the gradient's own shape.

    ``members`` are the gradients that were joined in ``bucket``.
    """
    if bucket.inner is None:
        return [whole]
    rows = [bucket.rows(look(member)) for member in members]
    parts = tf.split(whole, rows) if len(rows) > 1 else [whole]
    parts = [p if m.shape.rank == p.shape.rank else tf.reshape(p, m.shape) for p, m in zip(parts, members, strict=True)]
    for one, member in zip(parts, members, strict=True):
        one.set_shape(member.shape)
    return parts


def look(gradient: Any) -> GradientLook:
    """Return those properties of ``gradient`` that are known while the graph is traced."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return GradientLook("", 0, None)
    # as_list(): under disable_v2_behavior() a shape iterates over Dimension objects, which cannot be hashed.
    shape = tuple(gradient.shape.as_list()) if gradient.shape.is_fully_defined() else None
    return GradientLook(gradient.dtype.name, gradient.dtype.size, shape)
