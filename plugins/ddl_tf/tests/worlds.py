"""Runs collectives on ranks that are threads; each rank runs them eagerly, in a tf.function and in a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from ddlcore.testing import run_world

__all__ = ["MODES", "SIZE", "evaluate", "ranks"]

SIZE = 3
MODES = pytest.mark.parametrize("mode", ["eager", "function", "session"])


def ranks(function: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Call ``function(rank)`` on every rank of a new world, and return the results by rank."""
    return run_world(size, lambda rank, job: function(rank), deadline_s=90.0)


def evaluate(mode: str, build: Callable[..., Any], *tensors: Any, times: int = 2) -> Any:
    """Return what ``build(*tensors)`` gives, as numpy arrays.

    A graph is run ``times`` times, and the last result is returned.

    Sessions have one inter-op thread, so a collective that blocked it would show as a test that does not end.
    """
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if mode == "session":
        return _in_session(build, values, times)
    function = tf.function(build) if mode == "function" else build
    for _ in range(times if mode == "function" else 1):
        result = function(*values)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), result, expand_composites=True)


def _in_session(build: Callable[..., Any], values: list[Any], times: int) -> Any:
    v1 = tf.compat.v1
    config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default():
        places = [v1.placeholder(value.dtype, value.shape) for value in values]
        result = build(*places)
        with v1.Session(config=config) as session:
            for _ in range(times):
                arrays = session.run(result, {place: value.numpy() for place, value in zip(places, values)})
    return arrays
