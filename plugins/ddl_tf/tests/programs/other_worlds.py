"""Traces graphs in one world and runs them in another one with other ranks, as an elastic job does."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import ddl_tf as ddl
import numpy as np
import tensorflow as tf
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction


def own(rank: int, shift: float = 0.0) -> Any:
    """Return a tensor of shape (6, 2) whose values differ between ranks."""
    return tf.constant(np.arange(12.0).reshape(6, 2) * (rank + 1.0) + shift)


def graphs() -> dict[str, Any]:
    """Return functions whose results depend on this rank or on the number of ranks, none of them traced."""
    reduction = Reducer(Reduction(), "present")

    def gradient(collective: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = collective(x)
            loss = tf.reduce_sum(y * tf.cast(tf.range(1, 1 + tf.size(y)), y.dtype)[:1] * y)
        return tape.gradient(loss, x)

    def slices(x: Any) -> Any:
        sparse = tf.IndexedSlices(x, tf.range(6), tf.constant([6, 2]))
        dense, reduced = reduction.reduce([x, sparse], [x, x])
        return dense + tf.convert_to_tensor(reduced) + tf.convert_to_tensor(ddl.allreduce(sparse))

    def variables(x: Any) -> Any:
        variable.assign(x)
        ddl.broadcast_variables([variable], 0)
        return variable.read_value()

    variable = tf.Variable(tf.zeros((6, 2), tf.float64))
    functions = {
        "slices": slices,
        "variables": variables,
        "allreduce": lambda x: ddl.allreduce(x),
        "allgather": lambda x: gradient(ddl.allgather, x),
        "broadcast": lambda x: gradient(lambda y: ddl.broadcast(y, 0), x),
        "reducescatter": lambda x: gradient(lambda y: ddl.reducescatter(y, op=ddl.Sum), x),
        "alltoall": lambda x: gradient(lambda y: ddl.alltoall(y), x),
    }
    return {name: tf.function(function, autograph=False) for name, function in functions.items()}


ME = int(os.environ["DDL_RANK"])
for module in ("broadcast", "present", "reducer"):
    import_module(f"ddl_tf.{module}").elastic_member = lambda: "a member"  # type: ignore[attr-defined]  # not in this job

for before, after in (([0, 1, 2], [2, 0]), ([0], [1, 0, 2]), ([1, 2], [2, 1])):
    traced = None
    if ME in before:
        ddl.init(comm=before)
        traced = graphs()
        for function in traced.values():
            function(own(ddl.rank()))
        ddl.shutdown()
    if ME in after:
        ddl.init(comm=after)
        eager = graphs()
        for name, function in (traced or graphs()).items():
            given = function(own(ddl.rank(), 0.5))
            expected = eager[name].python_function(own(ddl.rank(), 0.5))
            np.testing.assert_allclose(given, expected, err_msg=f"{name}: from {before} to {after}")
        print(f"rank {ddl.rank()} of {ddl.size()} agrees", flush=True)
        ddl.shutdown()
