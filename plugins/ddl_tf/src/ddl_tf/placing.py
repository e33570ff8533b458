"""Decides which gradients of a graph stay on a GPU, by what is known while it is traced; puts nothing into it.

In a graph a gradient lies nowhere before it runs, and all operations must have their devices by then. So the variable
says where: its gradient is computed there, or is brought there. Whatever is not known to stay is staged on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.devices import tell_of_graphs

__all__ = ["apart", "gpu_of", "places"]

_GPU = re.compile(r"/device:GPU:\d+$")
NOT_ON_GPU = "gradients of variables that no GPU holds", "their variables are there"
SPARSE = "sparse gradients", "what is gathered waits for the others' sizes"
TYPE = "gradients of other types than floats", "TensorFlow keeps such types on the host"
SESSION = "gradients in a session", "its GPUs need not be those of eager TensorFlow, by which Python sees tensors there"
STRATEGY = "gradients under a strategy of tf.distribute", "a variable stands for several there"


def gpu_of(variable: Any) -> str:
    """TensorFlow's name of the GPU that holds a variable; '' where none does, or where that is not known yet."""
    inner = getattr(variable, "value", None)  # of Keras 3
    held = inner if isinstance(inner, tf.Variable) else variable
    name = held.device if isinstance(held, tf.Variable) else ""
    return name if name and _GPU.search(name) else ""


def places(
    given: Sequence[Any], variables: Sequence[Any], types: Collection[Any], serves: Callable[[str], bool]
) -> list[str]:
    """By which GPU each gradient is reduced; '' where it is staged on the host, or None. What goes so and why is logged, once.

    ``types``: what stays there. ``serves``: whether the job reaches that GPU; asked where somebody could use it.
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
    """What goes off together, by where it is, in the order in which the places first come."""
    parts: dict[str, list[int]] = {}
    for i in run:
        parts.setdefault(places[i], []).append(i)
    return list(parts.items())
