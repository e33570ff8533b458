"""One rank of two: checks the values of all ways to reduce gradients in TensorFlow, and prints one line per check.

Run it with `ddl run -np 2`. TensorFlow has one thread of each kind per rank.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import ddl_tf as ddl
import numpy as np
import tensorflow as tf
from ddl_tf.exchange import Pools
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

STEPS, ROWS = 10, 8
RATE = 0.125  # exact in float32, to which a v1 optimizer converts it
RNG = np.random.default_rng(7)
INPUTS = RNG.normal(size=(STEPS, ROWS, 6))
TARGETS = RNG.normal(size=(STEPS, ROWS, 3))
FIRST = [RNG.normal(size=(6, 5)) / 3, RNG.normal(size=(5,)), RNG.normal(size=(5, 3)) / 3, RNG.normal(size=(3,))]


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    hidden = tf.tanh(tf.matmul(x, weights[0]) + weights[1])
    return tf.reduce_mean((tf.matmul(hidden, weights[2]) + weights[3] - y) ** 2)


@cache
def alone() -> list[Any]:
    """Return the result of one rank that trains on the whole batches."""
    weights = [tf.Variable(value) for value in FIRST]
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)
    return [weight.numpy() for weight in weights]


def mine(batch: Any) -> Any:
    half = ROWS // ddl.size()
    return batch[ddl.rank() * half : (ddl.rank() + 1) * half]


def same(left: Any, right: Any) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def refused(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """Return the text of the error that the function raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def tape_eager(graph: bool = False) -> None:
    weights = [tf.Variable(value) for value in FIRST]

    def step(x: Any, y: Any) -> None:
        with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(weights, x, y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)

    run = tf.function(step) if graph else step
    for x, y in zip(INPUTS, TARGETS, strict=True):
        run(tf.constant(mine(x)), tf.constant(mine(y)))
    same([weight.numpy() for weight in weights], alone())


def tape_function() -> None:
    tape_eager(graph=True)


def uneven(batch: Any) -> Any:
    """Return this rank's rows of a batch: 3 of 8 on the first rank, 5 on the other one."""
    return batch[:3] if ddl.rank() == 0 else batch[3:]


def weights_of_rows() -> None:
    """Check the average over rows: numbers, tensors, variables, functions and shares; eagerly, and in one graph."""
    counter = tf.Variable(0.0)
    rows = 3 + 2 * ddl.rank()
    ways: list[tuple[Callable[[Any], Any], bool]] = [
        (lambda x: rows, False),
        (lambda x: tf.shape(x)[0], True),
        (lambda x: counter, True),
        (lambda x: lambda: rows, True),
        (lambda x: lambda: ddl.Share(rows, ROWS, ddl.size()), True),
        (lambda x: ddl.Share(rows, ROWS, ddl.size()), True),
    ]
    for weight_of, in_graph in ways:
        for graph in {False, in_graph}:
            weights = [tf.Variable(value) for value in FIRST]

            def step(x: Any, y: Any, weights: Any = weights, weight_of: Any = weight_of) -> None:
                with ddl.DistributedGradientTape(tf.GradientTape(), weight=weight_of(x)) as tape:
                    loss = loss_of(weights, x, y)
                for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                    weight.assign_sub(RATE * gradient)

            run = tf.function(step) if graph else step
            counter.assign(float(rows))
            for x, y in zip(INPUTS, TARGETS, strict=True):
                run(tf.constant(uneven(x)), tf.constant(uneven(y)))
            same([weight.numpy() for weight in weights], alone())


def weights_that_are_none() -> None:
    """Check weights of 0: of one rank, whose gradients are NaN, and of all ranks."""
    variable = tf.Variable([1.0, 2.0])

    def step(weight: Any, factor: Any) -> Any:
        with ddl.DistributedGradientTape(tf.GradientTape(), weight=weight) as tape:
            loss = tf.reduce_sum(variable * factor)
        return tape.gradient(loss, [variable])[0]

    for run in (step, tf.function(step)):
        weight, factor = (tf.constant(2.0), 3.0) if ddl.rank() else (tf.constant(0.0), float("nan"))
        assert run(weight, tf.constant(factor)).numpy().tolist() == [3.0, 3.0]
        text = refused(
            (ddl.DdlInternalError, ValueError, tf.errors.OpError),
            partial(run, tf.constant(0.0), tf.constant(1.0)),
        )
        assert "weights of all ranks are 0" in text, text


def weights_in_replay() -> None:
    """Check that steps with weights that change send no control message."""
    weights = [tf.Variable(tf.ones((40, 3), tf.float32)) for _ in range(40)]

    def step(count: Any) -> Any:
        with ddl.DistributedGradientTape(tf.GradientTape(), weight=count) as tape:
            loss = tf.add_n([tf.reduce_sum(weight) for weight in weights]) * (1.0 + ddl.rank())
        return tape.gradient(loss, weights)

    for run in (step, tf.function(step)):
        for turn in range(20):
            if turn == 10:
                before = ddl.stats()["control_messages"]
            results = run(tf.constant(1.0 + turn * ddl.rank()))
            wanted = (1 + 2 * (1 + turn)) / (2 + turn)
            assert abs(results[39].numpy()[0, 0] - wanted) < 1e-5
        assert ddl.stats()["control_messages"] == before


def v1_optimizer() -> None:
    with tf.Graph().as_default():
        weights = [tf.compat.v1.Variable(value) for value in FIRST]
        x, y = (tf.compat.v1.placeholder(tf.float64, (ROWS // ddl.size(), width)) for width in (6, 3))
        optimizer = ddl.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(RATE))
        train = optimizer.minimize(loss_of(weights, x, y))
        init = ddl.broadcast_global_variables(0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(init)
            for inputs, targets in zip(INPUTS, TARGETS, strict=True):
                session.run(train, {x: mine(inputs), y: mine(targets)})
            same(session.run(weights), alone())


def v1_passes() -> None:
    """Check that two averaged passes of half a rank's rows each equal one pass over all of them."""
    with tf.Graph().as_default():
        weights = [tf.compat.v1.Variable(value) for value in FIRST]
        rows = ROWS // ddl.size() // 2
        x, y = (tf.compat.v1.placeholder(tf.float64, (rows, width)) for width in (6, 3))
        inner = tf.compat.v1.train.GradientDescentOptimizer(RATE)
        passes: dict[str, Any] = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
        train = ddl.DistributedOptimizer(inner, **passes).minimize(loss_of(weights, x, y))
        with tf.compat.v1.Session() as session:
            session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
            for inputs, targets in zip(INPUTS, TARGETS, strict=True):
                for part in (slice(0, rows), slice(rows, 2 * rows)):
                    session.run(train, {x: mine(inputs)[part], y: mine(targets)[part]})
            same(session.run(weights), alone())


def replay() -> None:
    """Check that repeated steps of a function send no control message, in a Python loop and in a TensorFlow loop."""
    weights = [tf.Variable(tf.ones((40, 3), tf.float32)) for _ in range(40)]
    reducer = Reducer(Reduction(), "replay")
    mean = (1 + ddl.size()) / 2

    def step(scale: Any) -> Any:
        return reducer.reduce([scale * weight for weight in weights], weights)

    run = tf.function(step)

    def ten(scale: Any) -> Any:
        total = tf.zeros((40, 3))
        for _ in tf.range(10):
            total += step(scale)[39]
        return total

    loop = tf.function(ten)

    scale = tf.constant(1.0 + ddl.rank())
    for repeated, factor in ((run, 1), (loop, 10)):
        for _ in range(8):
            repeated(scale)
        before = ddl.stats()["control_messages"]
        for _ in range(10):
            last = repeated(scale)
        assert ddl.stats()["control_messages"] == before, f"{ddl.stats()['control_messages'] - before} messages"
        np.testing.assert_allclose(last[39] if factor == 1 else last, factor * mean)


def kept() -> None:
    """Check that the results of one step which a user keeps are not overwritten by the next step."""
    weight = tf.Variable(tf.zeros((300, 100)))
    reducer = Reducer(Reduction(op=ddl.Sum), "kept")
    run = tf.function(lambda value: reducer.reduce([weight + value], [weight])[0])
    results = [run(tf.constant(float(i))) for i in range(6)]
    views = [memoryview(result) for result in results]
    assert [float(np.asarray(view)[0, 0]) for view in views] == [ddl.size() * float(i) for i in range(6)]
    constant = tf.function(lambda: reducer.reduce([tf.ones((300, 100))], [weight])[0])  # folded into a constant
    assert [float(constant()[5, 5]) for _ in range(3)] == [float(ddl.size())] * 3


def let_go() -> None:
    """Check that the memory of results is freed together with the function, also if the reduction is in a branch."""
    weight = tf.Variable(tf.zeros((300, 100)))
    reducer = Reducer(Reduction(op=ddl.Sum), "let_go")

    def count() -> int:
        gc.collect()
        return sum(isinstance(thing, Pools) and 0 in thing for thing in gc.get_objects())

    def train() -> Any:
        def reduced() -> Any:
            return reducer.reduce([weight + 1.0], [weight])[0]

        run = tf.function(lambda way: tf.cond(way > 0, reduced, lambda: tf.zeros_like(weight)))
        assert float(run(tf.constant(1))[0, 0]) == ddl.size()
        return run

    before = count()
    functions = [train() for _ in range(3)]
    assert count() - before == len(functions)
    functions.clear()
    assert count() == before


def kinds() -> None:
    """Check types, sparse gradients, None, compression, groups and local sources, eagerly and in a function."""
    weights = [tf.Variable(tf.ones((4, 2), dtype)) for dtype in (tf.float32, tf.float16, tf.bfloat16, tf.float64)]
    table = tf.Variable(tf.ones((10, 2)))
    rank, size = ddl.rank(), ddl.size()
    mean = (size + 1) / 2
    ways: list[dict[str, Any]] = [
        {},
        {"op": ddl.Sum},
        {"compression": ddl.Compression.fp16},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": [[weights[0]], [weights[1], weights[3]]]},
        {"device_dense": "/cpu:0", "device_sparse": "cpu"},
    ]
    for number, way in enumerate(ways):
        reducer = Reducer(Reduction(**way), f"kinds{number}")
        expected = mean * size if way.get("op") == ddl.Sum else mean

        def reduce(reducer: Reducer = reducer) -> Any:
            gradients: list[Any] = [tf.cast(1 + rank, w.dtype) * w for w in weights]
            rows = tf.constant([rank, 5])
            gradients.append(tf.IndexedSlices(tf.fill((2, 2), 1.0 + rank), rows, tf.constant([10, 2])))
            return reducer.reduce([*gradients, None], [*weights, table, table])

        for run in (reduce, tf.function(reduce)):
            *dense, sparse, nothing = run()
            assert nothing is None
            for gradient, weight in zip(dense, weights, strict=True):
                assert gradient.dtype == weight.dtype
                np.testing.assert_allclose(tf.cast(gradient, tf.float64), expected)
            whole = tf.convert_to_tensor(sparse).numpy()
            assert whole[5, 0] == expected and sparse.values.shape[0] == 2 * size, whole
    dense_reducer = Reducer(Reduction(sparse_as_dense=True), "dense")
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), tf.constant([10, 2]))
    assert dense_reducer.reduce([slices], [table])[0].numpy()[0, 0] == 1 / size
    with ddl.PartialDistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.register_local_source(table)
        loss = (1.0 + rank) * (tf.reduce_sum(table) + tf.reduce_sum(weights[0]))
    own, reduced = tape.gradient(loss, [table, weights[0]])
    assert own.numpy()[0, 0] == (1 + rank) / size and reduced.numpy()[0, 0] == mean
    ((source, own),), ((other, reduced),) = tape.get_local_and_global_gradients(loss, [table, weights[0]])
    assert source is table and own.numpy()[0, 0] == (1 + rank) / size
    assert other is weights[0] and reduced.numpy()[0, 0] == mean


def differing() -> None:
    """Check that all ranks raise an error if one rank lacks a gradient that the other has, and can continue."""
    weights = [tf.Variable(tf.ones((3,))), tf.Variable(tf.ones((4, 4)))]
    reducer = Reducer(Reduction(), "differing")

    def reduce(lacking: bool) -> Any:
        return reducer.reduce([weights[0] * 1.0, None if lacking else weights[1] * 1.0], weights)

    everyone = Reducer(Reduction(), "none")
    for run in (reduce, tf.function(reduce, autograph=False)):
        text = refused(Exception, partial(run, ddl.rank() == 1))
        assert "none for 1 'Variable" in text and "what next" in text, text
        ddl.barrier()
        assert everyone.reduce([None, None], weights) == [None, None]


def shuffled() -> None:
    """Check that ranks which run independent reductions in different orders, on one thread, never wait forever."""
    assert tf.config.threading.get_inter_op_parallelism_threads() in (0, 1)
    own = random.Random(ddl.rank() + 1)
    count = 6
    reducers = [Reducer(Reduction(op=ddl.Sum), f"shuffled{i}") for i in range(count)]
    runs = 0
    for variant in range(10):
        with tf.Graph().as_default():
            fed = tf.compat.v1.placeholder(tf.float32, ())
            sums: list[Any] = [None] * count
            before: list[Any] = []
            for i in own.sample(range(count), count):  # this rank's order of building and sending
                with tf.control_dependencies(before):
                    gradient = tf.fill((3 + i, 100), fed + i)
                before = [gradient]
                sums[i] = reducers[i].reduce([gradient], [gradient])[0]
            for i in own.sample(range(count), count):  # the order of the operations that use the results
                with tf.control_dependencies([sums[i]]):
                    before = [tf.reduce_sum(sums[i]) + (before[0][0, 0] if before[0].shape.rank else before[0])]
            config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
            with tf.compat.v1.Session(config=config) as session:
                for _ in range(20):
                    values = session.run(sums, {fed: 1.0 + ddl.rank()})
                    assert [float(v[0, 0]) for v in values] == [3.0 + 2 * i for i in range(count)]
                    runs += 1
        assert variant >= 0
    orders = own.sample(range(count), count)

    def in_own_order(value: Any) -> Any:
        return [reducers[i].reduce([tf.fill((3 + i, 100), value + i)], [value])[0] for i in orders]

    traced = tf.function(in_own_order)
    for _ in range(20):
        values = traced(tf.constant(1.0 + ddl.rank()))
        assert [float(v[0, 0]) for v in values] == [3.0 + 2 * i for i in orders]
    assert runs == 200


def called_twice() -> None:
    """Check functions that communicate and are called several times in one graph that does not order the calls."""
    variables = [[tf.Variable(tf.ones((8,))) for _ in range(3)] for _ in range(2)]

    def gradients(weights: Any, scale: Any) -> Any:
        with ddl.DistributedGradientTape(tf.GradientTape(), op=ddl.Sum) as tape:
            loss = sum(tf.reduce_sum(weight) * scale for weight in weights)
        return tape.gradient(loss, weights)

    ours, theirs = (tf.function(partial(gradients, weights)) for weights in variables)  # equal code, other models
    total = tf.function(lambda x: ddl.allreduce(x * variables[0][0], op=ddl.Sum))

    def all_of_them(x: Any) -> Any:
        return ours(x), ours(2 * x), theirs(3 * x), total(4 * x), total(5 * x)

    run = tf.function(all_of_them)
    every = float(ddl.size() * (ddl.size() + 1) // 2)
    for _ in range(20):
        *lists, first, second = run(tf.constant(1.0 + ddl.rank()))
        for factor, values in enumerate([*lists, [first], [second]], 1):
            assert {float(v) for value in values for v in value.numpy()} == {factor * every}, (factor, values)


def branches() -> None:
    """Check reductions inside conditions.

    Reductions in different, unordered conditions have different names; those in two branches of one condition have the
    same name.
    """
    weights = [tf.Variable(tf.ones((4,))) for _ in range(3)]

    def gradient(weight: Any, scale: Any) -> Any:
        with ddl.DistributedGradientTape(tf.GradientTape(), op=ddl.Sum) as tape:
            loss = tf.reduce_sum(weight) * scale
        return tape.gradient(loss, weight)

    def all_of_them(x: Any, way: Any) -> Any:
        late = [tf.ones((64, 64))]  # takes long, while the other rank has its gradient immediately
        for _ in range(50):
            late.append(late[-1] @ tf.eye(64))
        later = x * tf.reduce_mean(late[-1])
        xs = [x, later] if ddl.rank() == 0 else [later, x]
        first, second = (
            tf.cond(way > 0, partial(gradient, weights[i], xs[i]), partial(gradient, weights[i], 2 * xs[i]))
            for i in range(2)
        )
        return first, second, gradient(weights[2], x)

    run = tf.function(all_of_them)
    for agreed in (True, False):
        for turn in range(20):
            way = turn % 2 if agreed else ddl.rank()
            values = [float(value[0]) for value in run(tf.constant(1.0), tf.constant(way))]
            factors = [1 if (turn % 2 if agreed else rank) else 2 for rank in range(ddl.size())]
            assert values == [sum(factors), sum(factors), ddl.size()], (agreed, turn, values)


def broadcasts() -> None:
    rank = ddl.rank()
    kinds_of = (tf.float32, tf.int64, tf.bool, tf.uint32, tf.complex64, tf.bfloat16)
    variables = [tf.Variable(tf.cast(tf.fill((2, 3), 1 - rank), dtype)) for dtype in kinds_of]
    ddl.broadcast_variables(variables, 0, inplace=True)
    assert all(tf.cast(v, tf.float32).numpy()[1, 2] == 1.0 for v in variables)
    assert ddl.broadcast_([variables[0].assign_add(tf.fill((2, 3), float(rank)))], 1)[0].numpy()[0, 0] == 2.0
    text = refused(ddl.DdlInternalError, lambda: ddl.broadcast_variables(variables[: 1 + rank], 0))
    assert "not built yet" in text, text
    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        variable = tf.compat.v1.get_variable("v", initializer=float(rank))
        hook = ddl.BroadcastGlobalVariablesHook(1)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert session.run(variable) == 1.0


def main() -> None:
    ddl.init()
    alone()  # eager results, with which the graphs are compared
    checks = (
        tape_eager,
        tape_function,
        weights_of_rows,
        weights_that_are_none,
        weights_in_replay,
        v1_optimizer,
        v1_passes,
        replay,
        kept,
        let_go,
        kinds,
        differing,
        shuffled,
        called_twice,
        branches,
        broadcasts,
    )
    wanted = sys.argv[1:]
    for check in checks:
        if not wanted or check.__name__ in wanted:
            check()
            print("held", check.__name__, flush=True)


if __name__ == "__main__":
    main()
