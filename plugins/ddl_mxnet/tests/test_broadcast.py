"""broadcast_parameters gives every rank the root's values, at once or when a parameter is initialized."""

from __future__ import annotations

from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(240)


def filled(parameter: Any, value: float) -> None:
    parameter.set_data(mx.nd.full(parameter.shape, value))


def test_parameters_of_a_network() -> None:
    """A ParameterDict is broadcast from a root other than 0 with a prefix, and gradients do not change."""

    def play(rank: int, job: Any) -> list[float]:
        net = gluon.nn.HybridSequential(prefix="whole_")
        with net.name_scope():
            net.add(gluon.nn.Dense(3, in_units=2), gluon.nn.BatchNorm(in_channels=3))
        net.initialize()
        for parameter in net.collect_params().values():
            filled(parameter, float(rank))
        ddl.broadcast_parameters(net.collect_params(), root_rank=1, prefix="net.")
        return [float(parameter.data().asnumpy().min()) for parameter in net.collect_params().values()]

    for found in run_world(2, play, backend="threads"):
        assert found == [1.0] * 6


def test_dicts_of_a_module() -> None:
    """A dict of NDArrays of several types is broadcast."""

    def play(rank: int, job: Any) -> list[Any]:
        params = {
            "a": mx.nd.full((2, 3), rank + 1.0),
            "b": mx.nd.full((4,), rank + 1, dtype="int32"),
            "c": mx.nd.full((1,), rank + 1.0, dtype="float16"),
        }
        late = params["a"] * 1.0  # the engine may still be computing it
        params["a"] = late
        ddl.broadcast_parameters(params)
        return [value.asnumpy().max().item() for value in params.values()]

    assert run_world(3, play, backend="threads") == [[1, 1, 1]] * 3


def test_deferred_parameters_come_later() -> None:
    """Deferred parameters are broadcast in the first forward pass; the second pass sends nothing."""

    def play(rank: int, job: Any) -> tuple[list[Any], int, int]:
        net = gluon.nn.HybridSequential(prefix="deferred_")
        with net.name_scope():
            net.add(gluon.nn.Dense(3), gluon.nn.Dense(2))
        net.initialize(mx.init.Constant(rank + 1.0))
        ddl.broadcast_parameters(net.collect_params())
        counted = [job.stats()["buckets_negotiated"]]
        for _ in range(2):
            net(mx.nd.ones((1, 4))).wait_to_read()
            counted.append(job.stats()["buckets_negotiated"])
        found = [float(parameter.data().asnumpy().max()) for parameter in net.collect_params().values()]
        return found, counted[1] - counted[0], counted[2] - counted[1]

    for found, first, second in run_world(2, play, backend="threads"):
        assert found == [1.0, 0.0, 1.0, 0.0]  # biases are initialized with zeros
        assert first > 0
        assert second == 0


def test_the_root_has_values_and_the_others_do_not() -> None:
    """If only the root has read a checkpoint, the other ranks get shapes and values at once."""

    def play(rank: int, job: Any) -> tuple[Any, ...]:
        net = gluon.nn.Dense(3, prefix="checkpoint_")
        net.initialize(mx.init.Constant(rank + 1.0))
        if rank == 0:
            net(mx.nd.ones((1, 4)))
        ddl.broadcast_parameters(net.collect_params())
        return (*net.weight.data().shape, float(net.weight.data().asnumpy().max()))

    assert run_world(2, play, backend="threads") == [(3, 4, 1.0)] * 2


def test_what_cannot_be_broadcast() -> None:
    """Every rank raises the same error, which says what to do."""

    def play(rank: int, job: Any) -> list[str]:
        told = []
        deferred = gluon.nn.Dense(3, prefix="a_")
        deferred.initialize()
        if rank == 1:
            deferred(mx.nd.ones((1, 4)))
        bare = gluon.nn.Dense(3, in_units=2, prefix="b_")
        for params, what in (
            (deferred.collect_params(), "run one forward pass"),
            (bare.collect_params(), "call initialize"),
            ({f"x{rank}": mx.nd.ones(1)}, "different names: x0, x1"),
            ({"x": mx.nd.ones(1 + rank)}, "has shape"),
            ({"x": 3}, "x is no parameter"),
            ([mx.nd.ones(1)], "invalid params of type"),
        ):
            with pytest.raises(ValueError, match=what) as raised:
                ddl.broadcast_parameters(params)
            told.append(str(raised.value))
        with pytest.raises(ValueError, match="root_rank=2"):
            ddl.broadcast_parameters({"x": mx.nd.ones(1)}, root_rank=2)
        return told

    one, other = run_world(2, play, backend="threads")
    assert one == other


def test_values_are_numbers_again() -> None:
    """Broadcast values can be used at once."""

    def play(rank: int, job: Any) -> float:
        values = {"x": mx.nd.full((1000,), rank + 1.0)}
        ddl.broadcast_parameters(values)
        return float((values["x"] * 2).sum().asscalar())

    assert np.allclose(run_world(2, play, backend="threads"), 2000.0)
