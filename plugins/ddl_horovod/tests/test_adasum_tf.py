"""op=Adasum in the reductions, the tape and the optimizer of horovod.tensorflow, in worlds of threads."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as keras_hvd
import numpy as np
import pytest
import tensorflow as tf
from ddl_horovod import tf_adasum
from ddl_horovod.adasum import Background
from ddl_tf.reduction import Reduction

from ddlcore.api import add_process_set
from ddlcore.errors import DdlInternalError, InvalidArgument, MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from plugins.ddl_horovod.tests.formula import summed

SIZE = 3


def values(rank: int, dtype: Any = np.float64) -> Any:
    return (np.random.default_rng(rank).normal(size=(4, 5)) + 0.5).astype(dtype)


def wanted(factor: float = 1.0) -> Any:
    return factor * summed([values(rank) for rank in range(SIZE)])


def close(found: Any, factor: float = 1.0, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found, wanted(factor), rtol=tolerance, atol=tolerance)


def test_all_reductions_eagerly() -> None:
    """Reductions of one tensor and of several, with and without names and factors, give the adaptive sum for each type."""

    def program(rank: int, job: Job) -> None:
        given = tf.constant(values(rank))
        close(hvd.allreduce(given, op=hvd.Adasum))
        close(hvd.allreduce(given, None, "", "", hvd.Compression.none, hvd.Adasum, 2.0, 3.0, "factors"), 6.0)
        close(hvd.allreduce(given, op=hvd.Adasum, compression=hvd.Compression.fp16), tolerance=2e-3)
        for one in hvd.grouped_allreduce([given, values(rank)], op=hvd.Adasum):
            close(one)
        for dtype, tolerance in ((tf.float32, 1e-5), (tf.float16, 2e-3), (tf.bfloat16, 2e-2)):
            found = hvd.allreduce(tf.cast(given, dtype), op=hvd.Adasum)
            assert found.dtype == dtype
            close(tf.cast(found, tf.float64), tolerance=tolerance)

    run_world(SIZE, program)


def test_in_a_function_with_gradients() -> None:
    """The gradient is the adaptive sum of the ranks' gradients; independent reductions may run in any order."""

    def program(rank: int, job: Job) -> Any:
        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Adasum) * values(rank + 10))
            return tape.gradient(loss, x), hvd.allreduce(x, op=hvd.Adasum), hvd.allreduce(2 * x, op=hvd.Adasum)

        for _ in range(2):
            gradient, one, two = step(tf.constant(values(rank)))
            close(one)
            close(two, 2.0)
        return gradient.numpy()

    expected = summed([values(rank + 10) for rank in range(SIZE)])
    for gradient in run_world(SIZE, program):
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize("in_function", [False, True])
def test_the_tape(in_function: bool) -> None:
    """The gradients have the structure of the sources. None stays None, and a sparse gradient is made dense if wanted."""

    def program(rank: int, job: Job) -> None:
        a, unused, rows = tf.Variable(values(rank)), tf.Variable(1.0), tf.Variable(np.ones((3, 2)))

        def step() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum, sparse_as_dense=True) as tape:
                loss = tf.reduce_sum(a * values(rank)) + tf.reduce_sum(tf.gather(rows, [rank])) * (rank + 1.0)
            return tape.gradient(loss, {"a": a, "rows": rows, "unused": unused})

        found = (tf.function(step) if in_function else step)()
        close(found["a"])
        assert found["unused"] is None
        np.testing.assert_allclose(found["rows"], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])

    run_world(SIZE, program)


@pytest.mark.parametrize("in_function", [False, True])
def test_gradients_of_local_variables_are_only_scaled(in_function: bool) -> None:
    """They are those that the tape is told of, or those of local layers; other methods are those of the wrapped tape."""

    def program(rank: int, job: Job) -> None:
        a, mine = tf.Variable(values(rank)), tf.Variable(np.ones(2))
        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="float64")
        layer.build((None, 2))

        def gradients(tape: Any) -> Any:
            with tape:
                loss = (
                    tf.reduce_sum(a * values(rank))
                    + tf.reduce_sum(mine) * 6.0
                    + tf.reduce_sum(layer(np.ones((1, 2)))) * 3.0
                )
            assert len(tape.watched_variables()) == 3
            local, others = tape.get_local_and_global_gradients(loss, [mine, a, *layer.trainable_variables])
            return [gradient for _, gradient in local], [gradient for _, gradient in others]

        def with_source() -> Any:
            tape = hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum)
            tape.register_local_source(mine)
            return gradients(tape)

        def with_layer() -> Any:
            return gradients(
                hvd.PartialDistributedGradientTape(
                    tf.GradientTape(), op=hvd.Adasum, local_layers=layer, scale_local_gradients=False
                )
            )

        local, others = (tf.function(with_source) if in_function else with_source)()
        np.testing.assert_allclose(local, [[2.0, 2.0]])
        close(others[0])
        np.testing.assert_allclose(others[1], [[3.0], [3.0]])
        local, others = (tf.function(with_layer) if in_function else with_layer)()
        np.testing.assert_allclose(local, [[[3.0], [3.0]]])
        np.testing.assert_allclose(others[0], [6.0, 6.0])
        close(others[1])

    run_world(SIZE, program)


def test_a_rank_outside_the_process_set_keeps_its_gradients() -> None:
    """The tape of a member returns the adaptive sum over the members."""

    def program(rank: int, job: Job) -> float:
        pair = add_process_set([0, 2])
        x = tf.Variable([1.0])
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum, process_set=pair) as tape:
            loss = x * (1.0 + rank)
        return float(tape.gradient(loss, [x])[0].numpy()[0])

    both = float(summed([np.ones(1), np.full(1, 3.0)])[0])
    assert run_world(3, program) == pytest.approx([both, 2.0, both])


def alone(size: int, passes: int) -> float:
    """The value that the formula gives: each rank steps alone, and the changes are summed. TensorFlow's rate is a float32."""
    value = 1.0
    for first in range(0, 4, passes):
        own = []
        for rank in range(size):
            mine = value
            for _ in range(first, first + passes):
                mine -= 0.1 * 2 * mine * (rank + 1)
            own.append(np.array([mine - value]))
        value += float(summed(own)[0])
    return value


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_optimizer_sums_changes_in_a_session(size: int, passes: int) -> None:
    """An optimizer of tf.compat.v1.train in a graph gives what the formula gives."""

    def program(rank: int, job: Job) -> list[float]:
        with tf.Graph().as_default():
            x = tf.compat.v1.Variable([1.0], dtype=tf.float64, use_resource=True)
            plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum, backward_passes_per_step=passes)
            train = optimizer.minimize(tf.reduce_sum(x * x) * (rank + 1))
            ready = [tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()]
            with tf.compat.v1.Session() as session:
                for one in ready:
                    session.run(one)
                for _ in range(4):
                    session.run(train)
                return list(session.run(x))

    for found in run_world(size, program):
        np.testing.assert_allclose(found, alone(size, passes), rtol=1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_optimizer_sums_changes_eagerly(passes: int) -> None:
    """Outside of graphs and in a tf.function, the optimizer gives what the formula gives."""

    def program(rank: int, job: Job) -> list[float]:
        results = []
        for in_function in (False, True):
            x = tf.Variable([1.0], dtype=tf.float64)
            plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            optimizer = hvd.DistributedOptimizer(
                plain, op=hvd.Adasum, backward_passes_per_step=passes, name=f"o{in_function}"
            )

            def step(x: Any = x, optimizer: Any = optimizer) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(x * x) * (rank + 1)
                optimizer.apply_gradients([(tape.gradient(loss, x), x)])

            step = tf.function(step) if in_function else step
            for _ in range(4):
                step()
            results.append(x.numpy().item())
        return results

    for found in run_world(2, program):
        np.testing.assert_allclose(found, [alone(2, passes)] * 2, rtol=1e-6)


def test_a_rank_outside_the_process_set_keeps_its_changes() -> None:
    """The members combine their changes."""

    def program(rank: int, job: Job) -> float:
        pair = add_process_set([0, 2])
        x = tf.Variable([0.0])
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum, process_set=pair)
        optimizer.apply_gradients([(tf.constant([-1.0 - rank]), x)])
        return float(x.numpy()[0])

    both = float(summed([np.ones(1), np.full(1, 3.0)])[0])
    assert run_world(3, program) == pytest.approx([both, 2.0, both])


@pytest.mark.parametrize("passes", [1, 2])
def test_a_failed_reduction_leaves_the_variables_as_they_were(passes: int) -> None:
    """A rank does not keep its own steps if the others' changes do not come: here, because they differ in shape."""

    def program(rank: int, job: Job) -> list[float]:
        x = tf.Variable(tf.fill([2 + rank], 4.0))
        plain = tf.compat.v1.train.GradientDescentOptimizer(0.25)
        optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum, backward_passes_per_step=passes)
        for _ in range(passes - 1):
            optimizer.apply_gradients([(tf.ones_like(x), x)])
        with pytest.raises(MismatchError, match="shapes or types differ"):
            optimizer.apply_gradients([(tf.ones_like(x), x)])
        return list(x.numpy().tolist())

    assert run_world(2, program) == [[4.0] * 2, [4.0] * 3]


@pytest.mark.parametrize("optimizer", [True, False])
def test_an_interrupted_reduction_ends_the_job(optimizer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the job went on, this rank would have made its own step, and the others the step of all ranks."""

    def program(rank: int, job: Job) -> None:
        x = tf.Variable([1.0])
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        wrapped = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
        reducer = tf_adasum._AdasumReducer(Reduction(), "tape")
        reducer.active = True  # as on several ranks

        def step() -> Any:
            gradient = tf.ones_like(x)
            return wrapped.apply_gradients([(gradient, x)]) if optimizer else reducer.reduce([gradient], [x])

        with pytest.raises(DdlInternalError, match="a step of rank 0 was interrupted"):
            step()

    def interrupted(handle: Background) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Background, "wait", interrupted)
    run_world(1, program)


def test_what_adasum_does_not_support_is_refused() -> None:
    """The error names the argument, and is raised at once, as in Horovod."""

    def program(rank: int, job: Job) -> None:
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
        for verb, given in ((hvd.allreduce, slices), (hvd.grouped_allreduce, [slices])):
            with pytest.raises(NotImplementedError, match="sparse"):
                verb(given, op=hvd.Adasum)
        with pytest.raises(InvalidArgument, match="not for int32"):
            hvd.allreduce(tf.constant([1]), op=hvd.Adasum)
        with pytest.raises(InvalidArgument, match="supersedes average"):
            hvd.allreduce(tf.constant([1.0]), average=True, op=hvd.Adasum)
        with pytest.raises(ValueError, match="Adasum"):
            hvd.reducescatter(tf.ones(2), op=hvd.Adasum)
        with pytest.raises(ValueError, match=r"takes a tf\.GradientTape"):
            hvd.DistributedGradientTape(1, op=hvd.Adasum)
        with pytest.raises(InvalidArgument, match="op=Adasum has no weights"):
            hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum, weight=2.0)
        plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        for arguments, complaint in (
            ({"average_aggregated_gradients": True}, "average_aggregated_gradients"),
            ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
            ({"backward_passes_per_step": 0}, "must be 1 or more"),
        ):
            with pytest.raises(ValueError, match=complaint):
                hvd.DistributedOptimizer(plain, op=hvd.Adasum, **arguments)
        with pytest.raises(ValueError, match="not supported yet with Keras"):
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
        with pytest.raises(ValueError, match="Adasum"):
            keras_hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
        assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy().tolist() == [1.0]

    run_world(1, program)
