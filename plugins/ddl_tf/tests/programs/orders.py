"""Two ranks start independent collectives in different orders, 200 times, with one inter-op thread each.

Prints ``correct`` with the number of runs and the seconds they took. Arguments: "session" or "function"; optionally
"block", which waits in numpy_function, the simple way, and is expected to hang.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import ddl_tf as ddl
import numpy as np
import tensorflow as tf

RUNS, GRAPHS, COUNT = 200, 5, 8


def blocking(tensor: Any, name: str) -> Any:
    """Do the same as ``ddl.allreduce``, but block the executor's own thread."""
    from ddl_tf.autograd import OPERATIONS

    def run(array: Any) -> Any:
        return OPERATIONS.allreduce_async(array, name=name, op=ddl.Sum).wait()

    return tf.ensure_shape(tf.numpy_function(run, [tensor], tensor.dtype), tensor.shape)


def graph(seed: int, scale: Any, verb: Any) -> list[Any]:
    """Return the results of COUNT collectives that start in this rank's own order, and of COUNT that depend on them."""
    order = list(range(COUNT))
    random.Random(f"{seed} {ddl.rank()}").shuffle(order)
    firsts: list[Any] = [None] * COUNT
    before: list[Any] = []
    for i in order:
        with tf.control_dependencies(before):
            given = scale * float(i + 1) + tf.zeros([i + 1])
        firsts[i] = verb(given, f"first.{i}")
        before = [given]
    random.Random(f"{seed} {ddl.rank()} second").shuffle(order)
    seconds: list[Any] = [None] * COUNT
    for i in order:
        seconds[i] = verb(firsts[i][:1] + firsts[(i + 1) % COUNT][:1], f"second.{i}")
    return firsts + seconds


def check(results: list[Any], scale: float) -> None:
    total = scale * sum(range(1, ddl.size() + 1))
    for i in range(COUNT):
        np.testing.assert_allclose(results[i], np.full(i + 1, total * (i + 1)), rtol=1e-6)
        expected = ddl.size() * total * (i + 1 + (i + 1) % COUNT + 1)
        np.testing.assert_allclose(results[COUNT + i], [expected], rtol=1e-6)


def main(mode: str, verb: Any) -> None:
    mine = float(ddl.rank() + 1)
    begun_s = 0.0
    for seed in range(GRAPHS):
        if mode == "session":
            v1 = tf.compat.v1
            config = v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
            with tf.Graph().as_default(), v1.Session(config=config) as session:
                place = v1.placeholder(tf.float32, [])
                fetches = graph(seed, place, verb)
                begun_s -= time.monotonic()
                for run in range(RUNS // GRAPHS):
                    check(session.run(fetches, {place: mine * (run + 1)}), run + 1)
                begun_s += time.monotonic()
        else:
            step = tf.function(lambda scale, seed=seed: graph(seed, scale, verb))
            begun_s -= time.monotonic()
            for run in range(RUNS // GRAPHS):
                check([result.numpy() for result in step(tf.constant(mine * (run + 1)))], run + 1)
            begun_s += time.monotonic()
    print(f"{mode}: correct in {RUNS} runs of {2 * COUNT}, {begun_s:.1f} s")


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    ddl.init()
    for chosen in sys.argv[1].split(","):
        if "block" in sys.argv:
            main(chosen, blocking)
        else:
            main(chosen, lambda tensor, name: ddl.allreduce(tensor, op=ddl.Sum, name=name))
    ddl.shutdown()
