"""Two ranks in one process, with one inter-op thread for both, run reductions on pretended devices in different orders.

Each reduction has a second one that depends only on its result.

Prints ``correct`` once per rank. If an operation kept the thread while it waits, the program would hang.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[4]))

import ddl_tf as ddl
import tensorflow as tf
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from plugins.ddl_tf.tests.late import late_gpu, on_ranks

COUNT, FUNCTIONS, RUNS = 6, 5, 20


def play(rank: int) -> str:
    own = random.Random(rank + 1)
    reducers = [Reducer(Reduction(op=ddl.Sum), f"ordered{i}") for i in range(COUNT)]
    others = [Reducer(Reduction(op=ddl.Sum), f"second{i}") for i in range(COUNT)]
    weights = [tf.Variable(tf.ones((3 + i, 100)), name="host" if i == 2 else "gpu") for i in range(COUNT)]
    for _ in range(FUNCTIONS):
        orders = own.sample(range(COUNT), COUNT)

        def in_own_order(value: Any, orders: list[int] = orders) -> Any:
            before: list[Any] = []
            sums: list[Any] = [None] * COUNT
            for i in orders:
                with tf.control_dependencies(before):
                    gradient = weights[i] * (value + i)
                before = [gradient]
                (first,) = reducers[i].reduce([gradient], [weights[i]])
                (sums[i],) = others[i].reduce([2.0 * first], [weights[i]])
            return sums

        run = tf.function(in_own_order, autograph=False)
        for turn in range(RUNS):
            values = run(tf.constant(float(turn + rank)))
            assert [float(value[0, 0]) for value in values] == [4 * (2 * turn + 1 + 2 * i) for i in range(COUNT)]
    return f"correct in {FUNCTIONS * RUNS} runs of {2 * COUNT}"


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with late_gpu() as device:
        print(*on_ranks(device, play), sep="\n")
