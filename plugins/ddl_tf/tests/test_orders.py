"""Ranks that start independent operations of a graph in different orders never wait for each other forever."""

from __future__ import annotations

import re
from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from plugins.ddl_tf.tests.launching import PROGRAMS, launch
from plugins.ddl_tf.tests.worlds import evaluate, ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("what", ["collectives", "gradients"])
def test_two_ranks_in_opposite_orders(what: str, mode: str) -> None:
    """Three operations start in opposite orders on the two ranks, and three others depend on the results of one each.

    A session has one inter-op thread for each rank.
    """

    def play(rank: int) -> None:
        reducers = [Reducer(Reduction(op=ddl.Sum), f"ordered{i}") for i in range(6)]

        def summed(number: int, tensor: Any) -> Any:
            if what == "gradients":
                return reducers[number].reduce([tensor], [tensor])[0]
            return ddl.allreduce(tensor, op=ddl.Sum, name=f"ordered.{number}")

        def build(scale: Any) -> list[Any]:
            firsts: list[Any] = [None] * 3
            seconds: list[Any] = [None] * 3
            before: list[Any] = []
            for i in [0, 1, 2] if rank == 0 else [2, 1, 0]:
                with tf.control_dependencies(before):
                    given = scale * (i + 1.0) + tf.zeros([i + 1])
                before = [given]
                firsts[i] = summed(i, given)
                seconds[i] = summed(3 + i, firsts[i] + 1.0)
            return firsts + seconds

        results = evaluate(mode, build, np.float32(rank + 1.0), times=5)
        for i in range(3):
            np.testing.assert_array_equal(results[i], np.full(i + 1, 3.0 * (i + 1)))
            np.testing.assert_array_equal(results[3 + i], np.full(i + 1, 6.0 * (i + 1) + 2.0))

    ranks(play, 2)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(360)
def test_independent_collectives_in_different_orders() -> None:
    """200 runs of a session and 200 of functions succeed, with 16 collectives each in another order on each rank."""
    shown = launch(2, PROGRAMS / "orders.py", "session,function")
    lines = re.findall(r"(\w+: correct in 200 runs of 16), ([\d.]+) s", shown)
    print(lines)
    assert sorted(line for line, _ in lines) == sorted(
        ["session: correct in 200 runs of 16", "function: correct in 200 runs of 16"] * 2
    )
