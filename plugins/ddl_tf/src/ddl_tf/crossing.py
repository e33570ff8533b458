"""Puts the operations into a graph by which gradients leave it and come home; knows no collective and no variable.

From the host's memory they cross as arrays, from a GPU as eager tensors, which ``py_function`` makes of what lies there
without a copy. Neither blocks. What waits, for all of them, is the host's (``graph.asynchronous``); results on a GPU
stand aside meanwhile, and one more operation there hands them out behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ddl_tf.buckets import Bucket, Look
from ddl_tf.devices import HOST
from ddl_tf.exchange import TOKEN
from ddl_tf.graph import asynchronous

__all__ = ["arrive", "depart", "join", "lift", "look", "split"]

LABEL = "DdlGradients"


def depart(function: Callable[..., Any], first: int, tensors: Sequence[Any]) -> Any:
    """A token of the operation that gives arrays over: ``function(first, *arrays)``."""
    with tf.device(HOST):
        return _independent(tf.numpy_function(partial(function, first), tensors, tf.int32))


def lift(function: Callable[..., None], first: int, tensors: Sequence[Any], gpu: str) -> Any:
    """The operation that gives eager tensors on that GPU over: ``function(first, *tensors)``. No value comes of it."""
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
    """What ``take`` gives when all has been given over, by number; on the GPU that ``gpus`` names, or '' on the host."""
    if not any(gpus):
        return asynchronous(lambda *_: take(), tokens, dtypes, shapes, LABEL)
    here = [number for number, gpu in enumerate(gpus) if not gpu]
    landed: dict[int, Any] = {}  # empty but between the two operations of one run

    def wait(*_: Any) -> list[Any]:
        results = take()
        landed.clear()  # a run before this one may have gone wrong behind its wait
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
    """``output``; in a function, what makes it has no place in the order of tracing, which may differ between ranks."""
    graph = tf.compat.v1.get_default_graph()
    independently = getattr(getattr(graph, "experimental_acd_manager", None), "run_independently", None)
    if independently is not None:
        independently(getattr(output, "op", output))
    return output


# --- buckets


def join(members: Sequence[Any], bucket: Bucket) -> Any:
    """What travels for these gradients: (rows, *inner)."""
    if bucket.inner is None:
        return members[0]
    parts = [m if m.shape.rank == 1 + len(bucket.inner) else tf.reshape(m, [-1]) for m in members]
    return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


def split(whole: Any, bucket: Bucket, members: Sequence[Any]) -> list[Any]:
    """The members' parts of what came back."""
    if bucket.inner is None:
        return [whole]
    rows = [bucket.rows(look(member)) for member in members]
    parts = tf.split(whole, rows) if len(rows) > 1 else [whole]
    parts = [p if m.shape.rank == p.shape.rank else tf.reshape(p, m.shape) for p, m in zip(parts, members, strict=True)]
    for one, member in zip(parts, members, strict=True):
        one.set_shape(member.shape)
    return parts


def look(gradient: Any) -> Look:
    """What is known of it while the graph is traced."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return Look("", 0, None)
    # as_list(): under disable_v2_behavior() a shape iterates over Dimension objects, which cannot be hashed.
    shape = tuple(gradient.shape.as_list()) if gradient.shape.is_fully_defined() else None
    return Look(gradient.dtype.name, gradient.dtype.size, shape)
