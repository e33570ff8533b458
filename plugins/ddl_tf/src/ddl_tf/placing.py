"""Decides which gradients of a graph stay on a GPU, from the facts that are known while the graph is traced.

While a graph is traced, a gradient is on no device yet, but each operation must be given a device. So the device of the
variable decides: its gradient is computed on that device, or is copied to that device. A gradient that is not known to
be on a GPU is staged on the host. This module adds nothing to the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.devices import tell_of_graphs

_GPU = re.compile(r"/device:GPU:\d+$")
NOT_ON_GPU = "gradients of variables that no GPU holds", "their variables are there"
SPARSE = "sparse gradients", "their size depends on the other ranks"
TYPE = "gradients of other types than floats", "TensorFlow keeps such types on the host"
SESSION = "gradients in a session", "its GPUs need not be those of eager TensorFlow, which Python needs to reach a GPU"
STRATEGY = "gradients under a strategy of tf.distribute", "one variable stands for several copies there"


def gpu_of(variable: Any) -> str:
    """Return TensorFlow's name of the GPU that contains ``variable``, or '' if the variable is not on a GPU.

    Also returns '' if the device is not known yet.
    """
    inner = getattr(variable, "value", None)  # of Keras 3
    held = inner if isinstance(inner, tf.Variable) else variable
    name = held.device if isinstance(held, tf.Variable) else ""
    return name if name and _GPU.search(name) else ""


def places(
    given: Sequence[Any], variables: Sequence[Any], types: Collection[Any], serves: Callable[[str], bool]
) -> list[str]:
    """Return, for each gradient, the name of the GPU that reduces it, or '' if it is None or is staged on the host.

    Each reason for staging gradients on the host is logged once. ``given`` are the gradients, and ``variables`` their
    variables. ``types`` are the element types whose gradients may stay on a GPU. ``serves`` is a function that returns
    whether the job's transports reach the GPU with a given name; it is called only for GPUs that contain a variable.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        tell_of_graphs(*SESSION)
        return [""] * len(given)
    if tf.distribute.has_strategy():
        tell_of_graphs(*STRATEGY)
        return [""] * len(given)
    found, told, served = [""] * len(given), set(), dict[str, bool]()
    for i, (gradient, variable) in enumerate(zip(given, variables, strict=True)):
        if gradient is None:
            continue
        gpu = gpu_of(variable)
        reason = _reason(gradient, gpu, types)
        if reason is not None:
            told.add(reason)
            continue
        if gpu not in served:
            served[gpu] = serves(gpu)
        found[i] = gpu if served[gpu] else ""
    for reason in sorted(told):
        tell_of_graphs(*reason)
    return found


def _reason(gradient: Any, gpu: str, types: Collection[Any]) -> tuple[str, str] | None:
    if isinstance(gradient, tf.IndexedSlices):
        return SPARSE
    if not gpu:
        return NOT_ON_GPU
    return None if gradient.dtype in types else TYPE


def apart(run: Sequence[int], places: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Split the indices in ``run`` by device, and return (device, indices) pairs.

    ``places[i]`` is the device of index i. The devices are in the order in which they first occur in ``run``.
    """
    parts: dict[str, list[int]] = {}
    for i in run:
        parts.setdefault(places[i], []).append(i)
    return list(parts.items())
