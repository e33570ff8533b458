"""A tensor has the same name on all ranks, and no two operations that may be in flight at once have the same name."""

from __future__ import annotations

import gc
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras as ddl_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.api import current_job
from ddlcore.errors import MismatchError
from ddlcore.testing import run_world
from plugins.ddl_tf.tests.launching import PROGRAMS, launch

pytestmark = pytest.mark.timeout(120)

GRAPHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])


def local_shapes(rank: int, kind: str) -> list[tuple[int, ...]]:
    """Return the shapes of a rank's own variables, which differ in shape or in number from those of the other ranks."""
    return [(3 + rank, 2)] if kind == "shapes" else [(2,)] * (1 + 2 * rank)


LOCALS = pytest.mark.parametrize("kind", ["shapes", "number"])


def check_shared_and_local(shared: Any, local: Any, rank: int) -> None:
    """Check gradients of ``(rank + 1) * sum(variable)`` on two ranks: shared ones are the mean, local ones scaled."""
    np.testing.assert_array_equal(shared, np.full(shared.shape, 1.5))
    for one in local:
        np.testing.assert_array_equal(one, np.full(one.shape, (rank + 1) / 2))


@GRAPHS
@LOCALS
def test_a_tape_with_other_local_variables_on_each_rank(kind: str, graph: bool) -> None:
    """Ranks whose local variables differ in shape or number still reduce the others, with local ones first or last."""

    def play(rank: int, job: Any) -> None:
        shared = tf.Variable(tf.ones((2, 2)))
        local = [tf.Variable(tf.ones(shape)) for shape in local_shapes(rank, kind)]

        def step(sources: list[Any]) -> Any:
            with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
                for one in local:
                    tape.register_local_source(one)
                loss = (rank + 1.0) * tf.add_n([tf.reduce_sum(source) for source in sources])
            return tape.gradient(loss, sources)

        run = tf.function(step) if graph else step
        for _ in range(3):
            *own, mean = run([*local, shared])
            check_shared_and_local(mean.numpy(), own, rank)
            mean, *own = run([shared, *local])
            check_shared_and_local(mean.numpy(), own, rank)

    run_world(2, play, deadline_s=90.0)


@LOCALS
def test_a_keras_optimizer_with_other_local_layers_on_each_rank(kind: str) -> None:
    """PartialDistributedOptimizer steps by the mean in shared layers, and by own gradients in local layers."""

    def play(rank: int, job: Any) -> None:
        layers = [_Weight((2, 2)), *(_Weight(shape) for shape in local_shapes(rank, kind))]
        variables = [layer.weight for layer in layers]
        optimizer = ddl_keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layers[1:])
        optimizer.build(variables)
        for number in range(1, 4):
            optimizer.apply([tf.fill(one.shape, rank + 1.0) for one in variables], variables)
            shared, *local = ((1.0 - one.numpy()) / number for one in variables)
            check_shared_and_local(shared, local, rank)

    run_world(2, play, deadline_s=90.0)


class _Weight(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A layer that is built when it is made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = self.add_weight(shape=shape, initializer="ones")
        self.built = True


@LOCALS
def test_a_session_with_other_local_variables_on_each_rank(kind: str) -> None:
    """An optimizer of tf.compat.v1.train also steps correctly if the ranks' local variables differ."""
    v1 = tf.compat.v1

    def play(rank: int, job: Any) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            shapes = [(2, 2), *local_shapes(rank, kind)]
            variables = [v1.Variable(tf.ones(shape), use_resource=True) for shape in shapes]
            optimizer = ddl.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
            for one in variables[1:]:
                optimizer.register_local_var(one)
            train = optimizer.minimize((rank + 1.0) * tf.add_n([tf.reduce_sum(one) for one in variables]))
            session.run(v1.global_variables_initializer())
            for number in range(1, 4):
                session.run(train)
                shared, *local = ((1.0 - value) / number for value in session.run(variables))
                check_shared_and_local(shared, local, rank)

    run_world(2, play, deadline_s=90.0)


def test_shared_variables_that_differ_are_an_error_on_every_rank() -> None:
    """If one rank's tape is over another model, every rank raises an error, and no rank waits forever."""

    def play(rank: int, job: Any) -> None:
        variable = tf.Variable(tf.ones((2 + rank,)))
        with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable)
        with pytest.raises(MismatchError):
            tape.gradient(loss, [variable])

    run_world(2, play, deadline_s=90.0)


def test_tapes_over_two_models_of_equal_shapes_do_not_meet() -> None:
    """Tapes over two models with equal shapes, such as a generator and its critic, use different names.

    This also holds for a model made after another one was freed.
    """

    def play(rank: int, job: Any) -> tuple[list[str], int]:
        names: list[str] = []

        def step(model: list[Any]) -> None:
            with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = (rank + 1.0) * tf.add_n([tf.reduce_sum(one) for one in model])
            for gradient in tape.gradient(loss, model):
                np.testing.assert_array_equal(gradient, np.full(gradient.shape, 1.5))

        models = [[tf.Variable(tf.ones((3,))) for _ in range(2)] for _ in range(2)]
        begun = gradient_names(job)
        for _ in range(8):
            for model in models:
                step(model)
        names += sorted(gradient_names(job) - begun)
        del model
        models.clear()
        gc.collect()
        before = gradient_names(job)
        step([tf.Variable(tf.ones((3,))) for _ in range(2)])
        return names, len(gradient_names(job) - before)

    one, other = run_world(2, play, deadline_s=90.0)
    assert one == other
    assert len(one[0]) == 4 and one[1] == 2


def gradient_names(job: Any) -> set[str]:
    """Return the names of all gradients that the job's tapes and optimizers have reduced so far."""
    return {name for _, name in job.tensor_queue.unfinished.requests if "gradient." in name}


def test_optimizers_of_one_name_do_not_meet() -> None:
    """Optimizers of one name get different names, for Keras and for sessions, named by the user or not.

    The ranks agree on the names.
    """

    def play(rank: int, job: Any) -> list[str]:
        v1 = tf.compat.v1.train
        made = [
            ddl_keras.DistributedOptimizer(keras.optimizers.SGD(), name="same"),
            ddl_keras.DistributedOptimizer(keras.optimizers.SGD(), name="same"),
            ddl_keras.DistributedOptimizer(keras.optimizers.SGD(), name="same_1"),
            ddl_keras.DistributedOptimizer(keras.optimizers.SGD()),
            ddl_keras.DistributedOptimizer(keras.optimizers.SGD()),
        ]
        sessions = [ddl.DistributedOptimizer(v1.GradientDescentOptimizer(0.1), name="same") for _ in range(2)]
        reducers = [vars(one)["_ddl"].reducer for one in made] + [one._reducer for one in sessions]
        return [reducer.name for reducer in reducers]

    one, other = run_world(2, play, deadline_s=90.0)
    assert one == other
    assert len(set(one)) == len(one)


def test_several_broadcasts_in_one_function() -> None:
    """Several broadcasts in one tf.function are matched correctly: model and optimizer variables in the first step.

    Horovod's tensorflow2_mnist example does this. TensorFlow runs the broadcasts in parallel. They are also matched
    when the function is retraced and run again.
    """

    def play(rank: int, job: Any) -> None:
        model, state = ([tf.Variable(tf.fill((4, 3), 10.0 * which + rank)) for which in range(6)] for _ in range(2))

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def step(x: Any, first: bool) -> Any:
            if first:
                ddl.broadcast_variables(model, root_rank=1)
                ddl.broadcast_variables(state, root_rank=0)
                ddl.broadcast_(state[:1], 0)
                ddl.broadcast_(model[:1], 1, name="named")
                ddl.broadcast_(model[1:2], 1, name="named")
            return ddl.allreduce(x) + ddl.allreduce(2.0 * x)

        for turn in range(6):
            x = tf.fill((1 + turn % 2,), float(rank))  # the shape alternates, so that the function is retraced
            for variables in (model, state):
                for which, variable in enumerate(variables):
                    variable.assign(tf.fill((4, 3), 10.0 * which + rank))
            np.testing.assert_array_equal(step(x, True), np.full(1 + turn % 2, 1.5))
            np.testing.assert_array_equal(step(x, False), np.full(1 + turn % 2, 1.5))
            for root, variables in ((1, model), (0, state)):
                for which, variable in enumerate(variables):
                    np.testing.assert_array_equal(variable, np.full((4, 3), 10.0 * which + root))

    run_world(2, play, deadline_s=90.0)


def test_a_reducer_keeps_its_name_apart_in_the_next_job() -> None:
    """After ``shutdown()`` and ``init()``, old and new optimizers of one name still have different names."""

    def play(rank: int, job: Any) -> list[str]:
        before = Reducer(Reduction(), "same", unique=True)
        taken = Reducer(Reduction(), "same", unique=True)
        job.shutdown()
        ddl.init()
        try:
            assert current_job() is not job
            after = Reducer(Reduction(), "same", unique=True)
            for reducer in (before, taken):
                reducer.reduce([tf.ones(1)], [tf.Variable([1.0])])
            return [after.name, before.name, taken.name]
        finally:
            ddl.shutdown()

    (names,) = run_world(1, play, deadline_s=90.0)
    assert len(set(names)) == 3


def test_minimize_where_shapes_contain_dimensions() -> None:
    """An optimizer of a session uses the mean gradient, although shapes contain objects that cannot be hashed.

    This is a part of ``tf.disable_v2_behavior()``, as are variables that are no resources.
    """
    v1 = tf.compat.v1

    def play(rank: int, job: Any) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            ones = v1.ones_initializer()
            shapes = [(), (3,), (3,), (2, 3), (200, 200)]
            weights = [
                v1.get_variable(f"w{i}", shape, initializer=ones, use_resource=False) for i, shape in enumerate(shapes)
            ]
            table = v1.get_variable("table", (4, 2), initializer=ones, use_resource=False)
            rows = tf.nn.embedding_lookup(table, [rank, 3])
            loss = (rank + 1.0) * (tf.add_n([tf.reduce_sum(one) for one in weights]) + tf.reduce_sum(rows))
            train = ddl.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(loss)
            begin = ddl.broadcast_global_variables(0)
            session.run(v1.global_variables_initializer())
            session.run(begin)
            for _ in range(2):
                session.run(train)
            for value in session.run(weights):
                np.testing.assert_array_equal(value, np.full(value.shape, 1.0 - 2 * 1.5))
            np.testing.assert_array_equal(session.run(table)[:, 0], [1 - 2 * 0.5, 1 - 2 * 1.0, 1, 1 - 2 * 1.5])

    v1.disable_v2_tensorshape()
    try:
        run_world(2, play, deadline_s=90.0)
    finally:
        v1.enable_v2_tensorshape()


@pytest.mark.long
@pytest.mark.processes
def test_minimize_where_version_2_is_turned_off() -> None:
    """Two ranks train by the mean gradient under ``tf.disable_v2_behavior()``.

    Shapes then contain objects that cannot be hashed.
    """
    shown = launch(2, PROGRAMS / "version_1.py")
    assert shown.count("trained by the mean") == 2, shown
