"""Allreduces that MXNet's engine runs: they wait for what it computes, and what it computes waits for them."""

from __future__ import annotations

from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np

from ddlcore.testing import run_world


def test_results_are_waited_for_like_any_operators() -> None:
    """A chain of operators and collectives, pushed without a wait in between."""

    def play(rank: int, job: Any) -> Any:
        array = mx.nd.ones((1000,)) * (rank + 1)
        for _ in range(3):
            array = array * 2
            ddl.allreduce_(array, name="a", op=ddl.Sum)
            array = array + 1
        return array.asnumpy()

    for result in run_world(2, play):
        value = np.full(1000, 1.0)
        other = np.full(1000, 2.0)
        for _ in range(3):
            value = other = (value + other) * 2 + 1
        np.testing.assert_array_equal(result, value)
