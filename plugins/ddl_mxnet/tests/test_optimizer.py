"""DistributedOptimizer in a Module on ranks gives the same parameters as the bare optimizer in one process."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest

from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(240)

ROWS, STEPS = 8, 10


def module(rows: int, values: dict[str, Any] | None = None, hidden: int = 8) -> Any:
    """Return a bound Module with fixed initial parameters, or with ``values``."""
    x = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.Variable("x"), num_hidden=hidden, name="body"), act_type="tanh")
    out = mx.sym.LinearRegressionOutput(
        mx.sym.FullyConnected(x, num_hidden=3, name="head"), mx.sym.Variable("y"), name="out"
    )
    made = mx.mod.Module(out, ["x"], ["y"])
    made.bind([("x", (rows, 6))], [("y", (rows, 3))])
    random = np.random.RandomState(3)
    shapes = {"body_weight": (hidden, 6), "body_bias": (hidden,), "head_weight": (3, hidden), "head_bias": (3,)}
    made.init_params(
        arg_params=values or {name: mx.nd.array(random.randn(*shape) / 3) for name, shape in shapes.items()}
    )
    return made


def train(made: Any, rank: int, size: int, steps: range = range(STEPS)) -> list[Any]:
    """Train on this rank's rows of each global batch; return the parameters."""
    rows = ROWS // size
    for step in steps:
        random = np.random.RandomState(step)
        x, y = random.randn(ROWS, 6), random.randn(ROWS, 3)
        own = slice(rank * rows, (rank + 1) * rows)
        made.forward_backward(mx.io.DataBatch([mx.nd.array(x[own])], [mx.nd.array(y[own])]))
        made.update()
    values, _ = made.get_params()
    return [values[name].asnumpy().copy() for name in sorted(values)]


def alone(name: str, **settings: Any) -> list[Any]:
    """Return the parameters that one process computes."""
    made = module(ROWS)
    made.init_optimizer(None, mx.optimizer.create(name, rescale_grad=1 / ROWS, **settings))
    return train(made, 0, 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {}),
        ("sgd", {"gradient_predivide_factor": 2.0}),
        ("sgd", {"num_groups": 2}),
        ("adam", {}),
        ("lamb", {}),
    ],
)
def test_ten_steps_agree_with_one_process(name: str, options: dict[str, Any]) -> None:
    """Optimizers that update several parameters per call and those that update one agree with one process."""
    settings = {"learning_rate": 0.05, "wd": 0.01}
    expected = alone(name, **settings)

    def play(rank: int, job: Any) -> list[Any]:
        made = module(ROWS // 2)
        bare = mx.optimizer.create(name, rescale_grad=2 / ROWS, **settings)
        optimizer = ddl.DistributedOptimizer(bare, **options)
        assert optimizer is bare
        assert optimizer.rescale_grad == 2 / ROWS
        made.init_optimizer(None, optimizer)
        return train(made, rank, 2)

    one, other = run_world(2, play, backend="threads")
    for a, b, c in zip(expected, one, other):
        np.testing.assert_allclose(b, a, atol=2e-6)
        np.testing.assert_array_equal(b, c)


def test_all_gradients_go_off_together() -> None:
    """All gradients are reduced together although MXNet updates few parameters per call; later steps are replayed."""

    def play(rank: int, job: Any) -> tuple[int, int]:
        made = module(ROWS // 2)
        made.init_optimizer(None, ddl.DistributedOptimizer(mx.optimizer.create("sgd", rescale_grad=2 / ROWS)))
        train(made, rank, 2, range(20))
        before = job.stats()
        train(made, rank, 2, range(20, 40))
        after = job.stats()
        train(made, rank, 2, range(1))  # no rank leaves replay before the other has counted
        replayed = after["buckets_replayed"] - before["buckets_replayed"]
        return replayed, after["control_messages"] - before["control_messages"]

    for batches, messages in run_world(2, play, backend="threads"):
        assert batches <= 2 * 20
        assert messages == 0


def test_states_and_the_optimizer_itself_are_saved(tmp_path: Path) -> None:
    """A Module saves momentum, and an unpickled optimizer is distributed again, for any number of ranks."""
    settings = {"learning_rate": 0.05, "momentum": 0.9}
    expected = alone("sgd", **settings)

    def play(rank: int, job: Any) -> tuple[list[Any], float]:
        half = STEPS // 2
        made = module(ROWS // 2)
        optimizer = ddl.DistributedOptimizer(mx.optimizer.create("sgd", rescale_grad=2 / ROWS, **settings))
        made.init_optimizer(None, optimizer)
        train(made, rank, 2, range(half))
        file = str(tmp_path / str(rank))
        made.save_optimizer_states(file)
        values, _ = made.get_params()
        again = module(ROWS // 2, values)
        copied = pickle.loads(pickle.dumps(optimizer))
        again.init_optimizer(None, copied)
        again.load_optimizer_states(file)
        return train(again, rank, 2, range(half, STEPS)), copied.rescale_grad

    for found, factor in run_world(2, play, backend="threads"):
        assert factor == 2 / ROWS
        for a, b in zip(expected, found):
            np.testing.assert_allclose(b, a, atol=2e-6)


def test_a_process_set_trains_by_itself() -> None:
    """The members of a process set train together, and the third rank trains alone."""
    expected = alone("sgd", learning_rate=0.05)

    def play(rank: int, job: Any) -> list[Any]:
        pair = ddl.add_process_set([0, 2])
        made = module(ROWS // 2)
        bare = mx.optimizer.create("sgd", rescale_grad=2 / ROWS, learning_rate=0.05)
        made.init_optimizer(None, ddl.DistributedOptimizer(bare, process_set=pair))
        return train(made, {0: 0, 1: 0, 2: 1}[rank], 2)

    first, apart, third = run_world(3, play, backend="threads")
    for a, b, c, d in zip(expected, first, third, apart):
        np.testing.assert_allclose(b, a, atol=2e-6)
        np.testing.assert_array_equal(b, c)
        assert np.abs(d - b).max() > 1e-6


def test_arguments_that_do_not_fit() -> None:
    """Each invalid argument raises an error that says what to do."""

    def play(rank: int, job: Any) -> None:
        with pytest.raises(ValueError, match=r"make one: mx.optimizer.create"):
            ddl.DistributedOptimizer("sgd")
        once = ddl.DistributedOptimizer(mx.optimizer.create("sgd"))
        with pytest.raises(ValueError, match="wrap each optimizer once"):
            ddl.DistributedOptimizer(once)
        with pytest.raises(ValueError, match="gradient_predivide_factor"):
            ddl.DistributedOptimizer(mx.optimizer.create("sgd"), gradient_predivide_factor=-1.0)

    run_world(1, play, backend="threads")


def test_two_optimizers_do_not_share_names_and_are_replayed() -> None:
    """Two optimizers that both count their parameters from 0 do not clash, and the steps of both are replayed.

    An example is a generator and its critic. How far MXNet's engine is when a value is waited for differs between
    steps, and so does what may share a bucket. A schedule that is found after such a step holds. So not every ten steps
    need be without a message, but some are.
    """

    def play(rank: int, job: Any) -> tuple[list[Any], list[tuple[int, int]]]:
        modules = [module(ROWS // 2), module(ROWS // 2, hidden=5)]
        if rank:  # an optimizer that never reduces anything, on one rank only
            ddl.DistributedOptimizer(mx.optimizer.create("sgd"))
        for made, rate in zip(modules, (0.05, 0.01)):
            bare = mx.optimizer.create("sgd", rescale_grad=2 / ROWS, learning_rate=rate)
            made.init_optimizer(None, ddl.DistributedOptimizer(bare))
        values: list[Any] = []
        tens: list[tuple[int, int]] = []
        for step in range(STEPS + 50):
            if step >= STEPS and (step - STEPS) % 10 == 0:
                tens.append(counts(job))
            values = [train(made, rank, 2, range(step, step + 1)) for made in modules]
        return values[0] + values[1], [*tens, counts(job)]

    def counts(job: Any) -> tuple[int, int]:
        stats = job.stats()
        return stats["buckets_replayed"], stats["control_messages"]

    first, second = run_world(2, play)
    for own, other in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(own, other)
    for _, tens in (first, second):
        quiet = [after[0] - before[0] for before, after in pairwise(tens) if after[1] == before[1]]
        assert quiet and min(quiet) >= 10, tens


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_half_precision_with_a_float32_copy_of_the_weights(name: str) -> None:
    """With ``multi_precision``, float16 gradients are averaged in float32 and rounded once."""
    shapes = [(4, 3), (5,)]

    def gradients(step: int, rank: int) -> list[Any]:
        random = np.random.RandomState(2 * step + rank)
        return [random.randn(*shape).astype(np.float16) for shape in shapes]

    def train_half(optimizer: Any, gradients_of: Any) -> list[Any]:
        weights = [mx.nd.ones(shape, dtype="float16") for shape in shapes]
        states = [optimizer.create_state_multi_precision(i, weight) for i, weight in enumerate(weights)]
        for step in range(STEPS):
            arrays = [mx.nd.array(gradient, dtype="float16") for gradient in gradients_of(step)]
            if name == "sgd":  # several parameters in one call
                optimizer.update_multi_precision([0, 1], weights, arrays, states)
            else:
                for i in (0, 1):
                    optimizer.update_multi_precision(i, weights[i], arrays[i], states[i])
        return [weight.asnumpy() for weight in weights]

    def mean(step: int) -> list[Any]:
        pairs = zip(gradients(step, 0), gradients(step, 1), strict=True)
        return [((a.astype(np.float32) + b) / 2).astype(np.float16) for a, b in pairs]

    settings = {"learning_rate": 0.1, "multi_precision": True}
    expected = train_half(mx.optimizer.create(name, **settings), mean)

    def play(rank: int, job: Any) -> list[Any]:
        optimizer = ddl.DistributedOptimizer(mx.optimizer.create(name, **settings))
        return train_half(optimizer, lambda step: gradients(step, rank))

    for values in run_world(2, play):
        for own, other in zip(values, expected, strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("groups", [0, 2])
def test_gradients_that_share_memory_are_summed_once(groups: int) -> None:
    """Gradients that share memory are summed once: one array twice, a view in another shape, and a part."""

    def play(rank: int, job: Any) -> list[list[float]]:
        optimizer = ddl.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0), num_groups=groups)
        gradient = mx.nd.zeros((4,))
        gradients = [gradient, gradient, gradient.reshape((2, 2)), gradient[1:3], mx.nd.zeros((3,))]
        weights = [mx.nd.zeros(one.shape) for one in gradients]
        for _ in range(3):
            for one in (gradient, gradients[-1]):
                one[:] = rank + 1.0
            optimizer.update(list(range(5)), weights, gradients, [None] * 5)
        return [weight.asnumpy().ravel().tolist() for weight in weights]

    for weights in run_world(2, play):
        assert weights == [[-4.5] * 4, [-4.5] * 4, [-4.5] * 4, [-4.5] * 2, [-4.5] * 3]
