"""Reducers in worlds of threads, where TensorFlow runs eagerly, and the errors that they raise."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import ddl_tf as ddl
import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.errors import MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from ddlcore.types import Max


def test_the_mean_of_all_ranks_arrives_at_its_place() -> None:
    def play(rank: int, job: Job) -> Any:
        reducer = Reducer(Reduction(), "mean")
        variables = [tf.Variable(0.0), tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((2, 2)))]
        gradients = [tf.constant(float(rank)), None, tf.fill((2, 2), 2.0 * rank)]
        return [reducer.reduce(gradients, variables) for _ in range(3)]

    for results in run_world(3, play):
        for scalar, nothing, matrix in results:
            assert nothing is None
            assert float(scalar) == 1.0
            np.testing.assert_array_equal(matrix, np.full((2, 2), 2.0))


def test_ranks_outside_the_process_set_keep_their_own() -> None:
    def play(rank: int, job: Job) -> float:
        pair = ddl.add_process_set([0, 2])
        reducer = Reducer(Reduction(op=ddl.Sum, process_set=pair), "pair")
        return float(reducer.reduce([tf.constant(float(rank + 1))], [tf.Variable(0.0)])[0])

    assert run_world(3, play) == [4.0, 2.0, 4.0]


def test_a_user_compressor_stands_around_the_reduction() -> None:
    class Halves:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tf.cast(tensor * 2, ctx)

    def play(rank: int, job: Job) -> float:
        reducer = Reducer(Reduction(compression=Halves), "halves")
        return float(reducer.reduce([tf.constant(3.0)], [tf.Variable(0.0)])[0])

    assert run_world(2, play) == [3.0, 3.0]


def test_what_lies_on_a_gpu_is_brought_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors pass through the function that stages them on the host.

    No GPU is needed: the test replaces that function.
    """
    brought: list[int] = []

    def bring(adapter: Any, job: Job, tensors: Sequence[Any], stage_on_host: bool = False) -> list[Any]:
        brought.extend(int(tf.size(tensor)) for tensor in tensors)
        return [tf.identity(tensor) for tensor in tensors]

    for module in ("ddl_tf.reducer", "ddl_tf.broadcast"):  # by name, because the package has a function ``broadcast``
        monkeypatch.setattr(import_module(module), "brought", bring)

    def play(rank: int, job: Job) -> None:
        variables = [tf.Variable(tf.ones(3)), tf.Variable(tf.ones((4, 2)))]
        slices = tf.IndexedSlices(tf.ones((5, 2)), tf.zeros(5, tf.int32), tf.constant([4, 2]))
        Reducer(Reduction(), "home").reduce([tf.ones(3), slices], variables)
        ddl.broadcast_variables(variables, 0)

    run_world(2, play)
    assert sorted(brought) == [3, 3, 3, 3, 5, 5, 8, 8, 10, 10]


def test_none_on_one_rank_alone_raises_on_all_and_says_whose() -> None:
    def play(rank: int, job: Job) -> str:
        reducer = Reducer(Reduction(), "lacking")
        variables = [tf.Variable(0.0), tf.Variable(0.0, name="bias")]
        with pytest.raises(MismatchError) as caught:
            reducer.reduce([tf.constant(1.0), tf.constant(1.0) if rank else None], variables)
        return str(caught.value)

    for text in run_world(2, play):
        assert "1 gradients, none for 1 'bias:0'" in text
        assert "2 gradients" in text


def test_all_none_on_one_rank_alone_raises_on_all() -> None:
    def play(rank: int, job: Job) -> None:
        reducer = Reducer(Reduction(), "nothing")
        with pytest.raises(MismatchError):
            reducer.reduce([tf.constant(1.0) if rank else None], [tf.Variable(0.0)])

    run_world(2, play)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"op": ddl.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"gradient_predivide_factor": -1.0}, "greater than 0"),
        ({"groups": -1}, "0 or more"),
        ({"groups": "all"}, "groups should be"),
        ({"device_dense": "/gpu:7"}, "device_dense='/gpu:7'"),
        ({"device_sparse": "moon"}, "device_sparse='moon'"),
        ({"compression": 5}, "compression"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Reduction(**arguments)


def test_what_cannot_be_reduced_is_said_before_anything_is_sent() -> None:
    def play(rank: int, job: Job) -> None:
        variable = tf.Variable(tf.zeros(2))
        with pytest.raises(ValueError, match="not built yet"):
            Reducer(Reduction(), "empty").reduce([], [])
        with pytest.raises(ValueError, match="2 gradients are given for 1 variables"):
            Reducer(Reduction(), "two").reduce([variable, variable], [variable])
        with pytest.raises(ValueError, match="is no tensor"):
            Reducer(Reduction(), "object").reduce([object()], [variable])
        texts = tf.Variable(["one"], name="texts")
        with pytest.raises(ValueError, match="the gradient of 0 'texts:0': tensor type string is not supported"):
            Reducer(Reduction(), "texts").reduce([texts], [texts])
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([2, 2]))
        with pytest.raises(NotImplementedError, match="sparse_as_dense"):
            Reducer(Reduction(op=Max), "max").reduce([slices], [variable])
        with pytest.raises(ValueError, match=r"takes a tf\.GradientTape"):
            ddl.DistributedGradientTape(variable)
        tape = ddl.DistributedGradientTape(tf.GradientTape())
        with pytest.raises(ValueError, match="already"):
            ddl.DistributedGradientTape(tape)
        with pytest.raises(ValueError, match="is a variable"):
            tape.register_local_source(3.0)
        with pytest.raises(RuntimeError, match="does not support eager execution"):
            ddl.broadcast_global_variables(0)
        with pytest.raises(ValueError, match="root_rank=9 is not a member"):
            ddl.broadcast_variables([variable], 9)
        with pytest.raises(ValueError, match=r"pass tf\.Variable"):
            ddl.broadcast_variables([3.0], 0)
        xla = Reducer(Reduction(), "xla")
        compiled = tf.function(lambda: xla.reduce([tf.ones(2)], [variable]), jit_compile=True)
        with pytest.raises(ValueError, match="jit_compile"):
            compiled()

    run_world(2, play)


def test_tapes_of_one_loop_are_remembered_and_keep_the_structure_of_sources() -> None:
    measured = threading.Barrier(2)  # a rank that ended would leave the world, and the other would count that message

    def play(rank: int, job: Job) -> tuple[float, int]:
        variables = {"a": tf.Variable(2.0), "b": [tf.Variable(3.0)]}
        for _ in range(30):
            with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = (1.0 + rank) * variables["a"] * variables["b"][0]
            gradients = tape.gradient(loss, variables)
        before = job.stats()["control_messages"]
        with ddl.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = (1.0 + rank) * variables["a"] * variables["b"][0]
        gradients = tape.gradient(loss, variables, use_generic_names=True)
        messages = job.stats()["control_messages"] - before
        measured.wait(80.0)
        return float(gradients["b"][0]), messages

    assert run_world(2, play) == [(3.0, 0)] * 2
