"""Gradients of graphs that stay on a GPU.

With a pretended device, whose queue runs late and whose operations run on the CPU.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import ddl_tf as ddl
import ddl_tf.keras as ddl_keras
import keras
import numpy as np
import pytest
import tensorflow as tf
from ddl_conform.pretend import KIND, PretendRuntime
from ddl_conform.pretend_world import PretendWorld
from ddl_tf import crossing, placing
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.api import gpus
from ddlcore.testing import World
from plugins.ddl_tf.tests.late import CPU_0, LateGpu, late_gpu, on_ranks
from plugins.ddl_tf.tests.launching import LEAN, PROGRAMS
from tests.tiers import long

pytestmark = pytest.mark.timeout(270)
TYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


@pytest.fixture
def late() -> Iterator[LateGpu]:
    with late_gpu() as device:
        yield device


def crossings(function: Any, *args: Any) -> list[str]:
    """Return the Python operations that a tf.function has traced.

    PyFunc passes arrays, and EagerPyFunc passes tensors on a GPU.
    """
    graph = function.get_concrete_function(*args).graph
    return sorted(operation.type for operation in graph.get_operations() if "PyFunc" in operation.type)


def of_sizes() -> list[Any]:
    """Return variables whose gradients are joined, flattened and sent alone."""
    shapes = ((3,), (3,), (4, 2), (), (0, 3), (300, 100))
    return [tf.Variable(tf.ones(shape, dtype)) for shape in shapes for dtype in TYPES]


@pytest.mark.parametrize("route", [KIND, "cpu"])
@pytest.mark.parametrize("groups", [3, *long(None)])
def test_a_function_in_replay(late: LateGpu, route: str, groups: int | None) -> None:
    """Values equal those of one rank, all tensors stay on the device, and repeated steps send no control message."""
    measured = threading.Barrier(2)  # a rank that ended would leave the world, and the other would count that message

    def play(rank: int) -> None:
        weights = of_sizes()
        reducer = Reducer(Reduction(groups=groups), f"replayed{groups}")
        step = tf.function(lambda scale: reducer.reduce([tf.cast(scale, w.dtype) * w for w in weights], weights))
        assert crossings(step, tf.constant(1.0)) == ["EagerPyFunc"] * ((groups or 1) + 1)
        before = 0
        for turn in range(16):
            if turn == 8:
                before = ddl.stats()["control_messages"]
            values = step(tf.constant(float(2 * turn + rank)))
            for value, weight in zip(values, weights, strict=True):
                assert (value.dtype, value.shape) == (weight.dtype, weight.shape)
                np.testing.assert_array_equal(tf.cast(value, tf.float64), np.full(value.shape, 2 * turn + 0.5))
        assert ddl.stats()["control_messages"] == before
        measured.wait(120.0)

    on_ranks(late, play, route=route)
    assert late.waited > 0


def test_without_the_wait_values_are_wrong(late: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for the device values are wrong, so the wait is what makes them right above."""
    monkeypatch.setattr(PretendRuntime, "dawdle_s", 0.02)
    monkeypatch.setattr(late, "wait", lambda event: None)

    def play(rank: int) -> int:
        weight = tf.Variable(tf.ones((300, 100)))
        reducer = Reducer(Reduction(op=ddl.Sum), "unfenced")
        step = tf.function(lambda: reducer.reduce([1.0 * weight], [weight])[0])
        return sum(not (step().numpy() == 2.0).all() for _ in range(20))

    assert sum(on_ranks(late, play)) > 0


def test_a_loop_of_a_graph(late: LateGpu) -> None:
    """Steps within one call run in order: each begins with the values that the previous one has reduced."""

    def play(rank: int) -> float:
        weight = tf.Variable(tf.ones((40, 3)))
        reducer = Reducer(Reduction(), "looped")

        def ten() -> Any:
            total = tf.zeros((40, 3))
            for turn in tf.range(10):
                total += reducer.reduce([weight * (tf.cast(turn, tf.float32) + rank)], [weight])[0]
            return total

        run = tf.function(ten)
        for _ in range(4):
            total = run()
        return float(total[39, 2])

    assert on_ranks(late, play) == [50.0, 50.0]


def test_fit_of_keras(late: LateGpu) -> None:
    """A few steps on two ranks give what one rank gives with the whole batches."""
    inputs = np.random.default_rng(0).random((32, 4), np.float32)
    targets = inputs.sum(axis=1, keepdims=True)

    def trained(optimizer: Any, x: Any, y: Any, batch: int) -> list[Any]:
        layers = [keras.layers.Dense(3, kernel_initializer="ones"), keras.layers.Dense(1, kernel_initializer="ones")]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
        return [np.asarray(weight) for weight in model.weights]

    def play(rank: int) -> Any:
        optimizer = ddl_keras.DistributedOptimizer(keras.optimizers.SGD(0.01))
        return trained(optimizer, inputs[rank::2], targets[rank::2], 4)

    ours = on_ranks(late, play)
    assert late.waited > 0
    alone = trained(keras.optimizers.SGD(0.01), inputs, targets, 8)
    for weights in ours:
        for mine, whole in zip(weights, alone, strict=True):
            np.testing.assert_allclose(mine, whole, rtol=1e-4)


def test_a_mixed_model(late: LateGpu) -> None:
    """Gradients that a GPU does not hold or serve are staged on the host; all gradients together are one reduction."""

    def play(rank: int) -> None:
        weights = [
            tf.Variable(tf.ones((3, 2)), name="gpu"),
            tf.Variable(tf.ones((3, 2)), name="host"),
            tf.Variable(tf.ones((5,)), name="gpu"),
            tf.Variable(tf.ones((300, 100)), name="host"),
            tf.Variable(tf.ones((2,), tf.int32), name="gpu"),
            tf.Variable(tf.ones((10, 2)), name="gpu"),
            tf.Variable(0.0, name="gpu"),
        ]
        reducer = Reducer(Reduction(op=ddl.Sum, groups=2), "mixed")

        def reduce(scale: Any) -> Any:
            dense = [tf.cast(scale, weight.dtype) * weight for weight in weights[:5]]
            slices = tf.IndexedSlices(tf.fill((2, 2), scale), tf.constant([rank, 5]), tf.constant([10, 2]))
            return reducer.reduce([*dense, slices, None], weights)

        step = tf.function(reduce)
        for turn in range(8):
            *dense, slices, nothing = step(tf.constant(turn + 1.0 + rank))
            assert nothing is None
            for value, weight in zip(dense, weights[:5], strict=True):
                np.testing.assert_array_equal(value, np.full(weight.shape, 2 * turn + 3))
            assert tf.convert_to_tensor(slices).numpy()[5, 0] == 2 * turn + 3
        # Each of two groups has both kinds. One PyFunc more sends slices, one EagerPyFunc more returns results.
        assert crossings(step, tf.constant(0.0)) == ["EagerPyFunc"] * 3 + ["PyFunc"] * 3

    on_ranks(late, play)


@pytest.mark.parametrize("way", ["asked", "unserved"])
def test_all_by_way_of_the_host(late: LateGpu, way: str) -> None:
    """All gradients are staged on the host if device_dense says so, or if the job does not reach the device."""

    def play(rank: int) -> None:
        weights = of_sizes()
        reducer = Reducer(Reduction(device_dense="/cpu:0" if way == "asked" else ""), f"hosted.{way}")
        step = tf.function(lambda scale: reducer.reduce([tf.cast(scale, w.dtype) * w for w in weights], weights))
        assert [float(tf.reduce_sum(tf.cast(v, tf.float64))) for v in step(tf.constant(1.0 + 2 * rank))][:4] == [
            6.0
        ] * 4
        assert crossings(step, tf.constant(1.0)) == ["PyFunc"]

    on_ranks(late, play, PretendWorld if way == "asked" else World)
    assert late.waited == 0


def test_a_tape_that_asks_for_the_host_is_not_another(late: LateGpu) -> None:
    """Two tapes over the same variables may differ in where their gradients are reduced."""

    def play(rank: int) -> list[list[str]]:
        weight = tf.Variable(tf.ones(3))

        def gradient(device_dense: str) -> Any:
            with ddl.DistributedGradientTape(tf.GradientTape(), device_dense=device_dense) as tape:
                loss = tf.reduce_sum(weight * weight)
            return tape.gradient(loss, weight)

        return [crossings(tf.function(gradient), device) for device in ("", "/cpu:0")]

    assert on_ranks(late, play) == [[["EagerPyFunc"] * 2, ["PyFunc"]]] * 2


def test_a_session_goes_by_way_of_the_host(
    late: LateGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients in a session are staged on the host, because it has devices of its own.

    This is logged once if there is a GPU.
    """
    gpus._log.cache_clear()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])

    def play(rank: int) -> list[float]:
        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            weight = v1.get_variable("weight", (3,), initializer=v1.ones_initializer(), use_resource=True)
            optimizer = ddl.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
            train = optimizer.minimize(tf.reduce_sum(weight) * (1.0 + rank))
            assert not [operation for operation in graph.get_operations() if operation.type == "EagerPyFunc"]
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(4):
                    session.run(train)
                return list(session.run(weight).tolist())

    with caplog.at_level(logging.INFO, "ddl"):
        assert on_ranks(late, play, settings={"log_level": "INFO"}) == [[-2.0] * 3] * 2
    gpus._log.cache_clear()
    (line,) = [text for text in caplog.messages if text.startswith("in graphs, ")]
    assert line.startswith("in graphs, gradients in a session are staged on the host: its GPUs need not be")


def test_a_device_that_is_gone_when_the_graph_runs(late: LateGpu) -> None:
    """If the device of the tracing is gone when the graph runs, the tensors are taken from the host."""

    def play(rank: int) -> float:
        weight = tf.Variable(tf.ones(3))
        reducer = Reducer(Reduction(), "gone")
        step = tf.function(lambda scale: reducer.reduce([scale * weight], [weight])[0])
        step.get_concrete_function(tf.constant(0.0))
        traced.wait(120.0)
        late.gone = True
        return [float(step(tf.constant(1.0 + rank * turn))[0]) for turn in range(6)][-1]

    traced = threading.Barrier(2)
    assert on_ranks(late, play) == [3.5, 3.5]
    assert late.waited == 0


def test_results_are_let_go(late: LateGpu) -> None:
    """ddl releases results as soon as TensorFlow has them, so that the next step can use their memory."""
    made: list[Any] = []
    late.made.append(lambda tensor: made.append(weakref.ref(tensor)))
    both = threading.Barrier(2)

    def left() -> int:
        gc.collect()
        return sum(one() is not None for one in made)

    def play(rank: int) -> int:
        weights = [tf.Variable(tf.ones((300, 100))), tf.Variable(tf.ones(3))]
        reducer = Reducer(Reduction(), "let go")
        step = tf.function(lambda: reducer.reduce([1.0 * weight for weight in weights], weights))
        for _ in range(8):
            step()
        both.wait(120.0)
        until = time.monotonic() + 10.0  # the engine checks only from time to time whether its queue is done
        while left() and time.monotonic() < until:
            time.sleep(0.01)
        kept = left()
        both.wait(120.0)
        return kept

    assert on_ranks(late, play) == [0, 0]
    assert len(made) == 8 * 2 * 2


@pytest.mark.parametrize("names", [("gpu gpu", "gpu host"), ("gpu host gpu", "host gpu gpu")])
def test_ranks_that_have_it_elsewhere(late: LateGpu, names: tuple[str, str]) -> None:
    """If ranks have gradients on different devices, both raise and say how many are on a GPU.

    This holds even if the buckets look the same.
    """

    def play(rank: int) -> str:
        weights = [tf.Variable(tf.ones(3), name=name) for name in names[rank].split()]
        reducer = Reducer(Reduction(), "elsewhere")
        with pytest.raises(tf.errors.OpError, match="MismatchError") as caught:
            tf.function(lambda: reducer.reduce([1.0 * weight for weight in weights], weights))()
        return str(caught.value)

    for text in on_ranks(late, play):
        for name in names:
            assert f"{len(name.split())} gradients, {name.count('gpu')} on a GPU" in text


def test_two_ranks_in_opposite_orders(late: LateGpu) -> None:
    """Three reductions start in opposite orders on the two ranks, and three others depend on the results of one each."""

    def play(rank: int) -> None:
        reducers = [Reducer(Reduction(op=ddl.Sum), f"opposite{i}") for i in range(6)]
        weights = [tf.Variable(tf.ones((3 + i, 2)), name="host" if i == 2 else "gpu") for i in range(3)]

        def build(value: Any) -> list[Any]:
            sums: list[Any] = [None] * 3
            before: list[Any] = []
            for i in [0, 1, 2] if rank == 0 else [2, 1, 0]:
                with tf.control_dependencies(before):
                    gradient = weights[i] * (value + i)
                before = [gradient]
                (first,) = reducers[i].reduce([gradient], [weights[i]])
                (sums[i],) = reducers[3 + i].reduce([2.0 * first], [weights[i]])
            return sums

        run = tf.function(build, autograph=False)
        for turn in range(5):
            values = run(tf.constant(float(turn + rank)))
            assert [float(value[0, 0]) for value in values] == [4 * (2 * turn + 1 + 2 * i) for i in range(3)]

    on_ranks(late, play)


@pytest.mark.long
@pytest.mark.timeout(140)
def test_one_thread_and_orders_of_their_own() -> None:
    """Ranks that run independent reductions in different orders never wait forever; see the program."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "gpu_orders.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=320,
        env={**os.environ, **LEAN},
    )
    assert done.returncode == 0, done.stdout
    assert "correct in 100 runs of 12\n" * 2 in done.stdout


def test_which_gpu_holds_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is found for a TensorFlow variable and for a Keras variable around one, and not for other tensors."""
    plain, wrapped = tf.Variable(1.0), keras.Variable(1.0)
    assert [placing.gpu_of(variable) for variable in (plain, wrapped, tf.constant(1.0))] == [""] * 3
    name = "/job:localhost/replica:0/task:0/device:GPU:1"
    monkeypatch.setattr(type(plain), "device", property(lambda variable: name))
    assert [placing.gpu_of(variable) for variable in (plain, wrapped, tf.constant(1.0))] == [name, name, ""]


def test_what_goes_off_together_is_parted_by_device() -> None:
    """Gradients are split by device, in the order in which the devices first occur."""
    assert placing.apart([4, 3, 1, 0], ["", CPU_0, "", "", CPU_0]) == [(CPU_0, [4, 1]), ("", [3, 0])]


def test_a_strategy_goes_by_way_of_the_host(late: LateGpu) -> None:
    """Under a tf.distribute strategy a variable has several copies, so its gradient is staged on the host."""
    variable, gradient = tf.Variable(1.0), tf.constant(1.0)
    serves = {CPU_0: True}.__getitem__
    assert placing.places([gradient], [variable], late.types, serves) == [CPU_0]
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        assert placing.places([gradient], [variable], late.types, serves) == [""]


def test_reasons_are_told(late: LateGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each reason for staging is logged once, however many gradients it applies to.

    Gradients that stay are not logged.
    """
    gpus._log.cache_clear()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([2, 2]))
    given = [tf.ones(2), tf.ones(2), tf.ones(2), tf.ones(2, tf.int32), slices, None]
    variables = [tf.Variable(tf.ones(2), name=name) for name in ("gpu", "host", "host", "gpu", "gpu", "gpu")]
    with caplog.at_level(logging.INFO, "ddl"):
        for _ in range(2):
            found = placing.places(given, variables, late.types, {CPU_0: True}.__getitem__)
            assert found == [CPU_0, "", "", "", "", ""]
    gpus._log.cache_clear()
    whats = [placing.TYPE[0], placing.NOT_ON_GPU[0], placing.SPARSE[0]]
    assert [text.split(" are staged on the host: ")[0] for text in caplog.messages] == [
        f"in graphs, {w}" for w in whats
    ]


def test_results_are_handed_out_once() -> None:
    """A second request for the same results raises an error: two runs of the graph have overlapped."""
    landed = {0: "a", 1: "b", 2: "c"}
    assert crossing._hand_out(landed, [0, 2]) == ["a", "c"]
    with pytest.raises(ValueError, match="one thread at a time"):
        crossing._hand_out(landed, [0])
