"""Graphs of an elastic job give right results in a world that has other ranks than the one in which they were traced."""

from __future__ import annotations

import re
from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.keras import SyncBatchNormalization
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.testing import run_world
from plugins.ddl_tf.tests.launching import PROGRAMS, launch
from plugins.ddl_tf.tests.worlds import Seat, seated, seats


def own(rank: int, shift: float = 0.0) -> Any:
    """Return a tensor of shape (6, 2) whose values differ between ranks."""
    return tf.constant(np.arange(12.0).reshape(6, 2) * (rank + 1.0) + shift)


def program() -> Any:
    """Return a function whose results depend on the rank and on the number of ranks. It is not traced yet."""
    reducer = Reducer(Reduction(), "present")
    variable = tf.Variable(tf.zeros((6, 2), tf.float64))
    layer = SyncBatchNormalization(dtype="float64")
    layer.build((None, 2))

    def gradient(collective: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(collective(x) ** 2)
        return tape.gradient(loss, x)

    def results(x: Any) -> dict[str, Any]:
        slices = tf.IndexedSlices(x, tf.range(6), tf.constant([6, 2]))
        dense, sparse = reducer.reduce([x, slices], [x, x])
        variable.assign(x)
        ddl.broadcast_variables([variable], 0)
        return {
            "dense gradients": dense,
            "sparse gradients": tf.convert_to_tensor(sparse),
            "slices": tf.convert_to_tensor(ddl.allreduce(slices)),
            "variables": variable.read_value(),
            "allgather": gradient(ddl.allgather, x),
            "broadcast": gradient(lambda y: ddl.broadcast(y, 0), x),
            "reducescatter": gradient(lambda y: ddl.reducescatter(y, op=ddl.Sum), x),
            "alltoall": gradient(ddl.alltoall, x),
            "batch normalization": layer(x, training=True),
        }

    return tf.function(results, autograph=False)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("before", "after"), [([0, 1], [1]), ([0], [1, 0])], ids=["fewer", "more"])
def test_a_graph_follows_its_rank_into_another_world(before: list[int], after: list[int]) -> None:
    """A graph gives what its function gives eagerly, although this rank's number and the world's size have changed."""
    traced: dict[int, tuple[Seat, Any]] = {}

    def trace(rank: int, job: Any) -> None:
        seat = Seat(job, "a member")
        with seated(seat):
            graph = program()
            graph(own(rank))
        traced[before[rank]] = seat, graph

    def go_on(rank: int, job: Any) -> None:
        seat, graph = traced.get(after[rank], (Seat(job, "a member"), None))
        seat.job = job
        with seated(seat):
            given = (graph or program())(own(rank, 0.5))
            for name, expected in program().python_function(own(rank, 0.5)).items():
                np.testing.assert_allclose(given[name], expected, err_msg=f"{name} of rank {rank}")

    with seats():
        run_world(len(before), trace)
        run_world(len(after), go_on)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(200)
def test_graphs_of_another_world() -> None:
    """A graph gives what its function gives eagerly, with other ranks, with more of them, and with fewer."""
    shown = launch(3, PROGRAMS / "other_worlds.py", timeout_s=180.0)
    assert sorted(re.findall(r"rank (\d) of (\d) agrees", shown)) == [
        *[("0", "2"), ("0", "2"), ("0", "3")],
        *[("1", "2"), ("1", "2"), ("1", "3")],
        ("2", "3"),
    ], shown
