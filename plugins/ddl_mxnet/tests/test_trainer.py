"""DistributedTrainer on several ranks gives the same as Gluon's Trainer in one process, and reports wrong use."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from ddlcore.testing import run_world
from plugins.ddl_mxnet.tests.training import STEPS, Network, Part, agree, values

pytestmark = pytest.mark.timeout(240)

STEP_S = 30.0  # much longer than any step here takes


class Halves:
    """A compressor of a user's own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, float]:
        return tensor * 4.0, 0.25

    @staticmethod
    def decompress(tensor: Any, ctx: float) -> Any:
        return tensor * ctx


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_predivide_factor": 4.0}, {"num_groups": 2}, {"prefix": "a."}, {"compression": Halves}],
    ids=["plain", "predivide", "groups", "prefix", "compressor"],
)
def test_ten_steps_agree_with_one_process(options: dict[str, Any]) -> None:
    """Two ranks give the same parameters as one process on the same global batches."""

    def train(part: Part) -> None:
        trainer = part.trainer(**options)
        for step in range(STEPS):
            trainer.step(part.backward(step))

    agree(train)


def test_half_precision_travels() -> None:
    """With fp16, float64 gradients are sent as float16."""

    def train(part: Part) -> None:
        trainer = part.trainer(compression=ddl.Compression.fp16)
        for step in range(STEPS):
            trainer.step(part.backward(step))

    agree(train, tolerance=0.01)


@pytest.mark.parametrize("optimizer", ["adam", "lamb", "nag"])
def test_optimizers(optimizer: str) -> None:
    """Every optimizer uses averaged gradients."""

    def train(part: Part) -> None:
        trainer = part.trainer(optimizer=(optimizer, {"learning_rate": 0.01}))
        for step in range(STEPS):
            trainer.step(part.backward(step))

    agree(train, tolerance=1e-6)  # lamb computes in float32


def test_gradients_can_be_clipped_between_reduction_and_update() -> None:
    """Between reduction and update gradients are sums, as with Horovod, and equal on every rank."""

    def train(part: Part) -> None:
        trainer = part.trainer()
        for step in range(STEPS):
            rows = part.backward(step)
            trainer.allreduce_grads()
            for parameter in part.net.collect_params().values():
                parameter.grad()[:] = parameter.grad().clip(-0.7, 0.7)
            trainer.update(rows)

    agree(train)


def test_accumulated_gradients() -> None:
    """With grad_req "add", several passes accumulate before one step."""

    def train(part: Part) -> None:
        trainer = part.trainer()
        part.net.collect_params().setattr("grad_req", "add")
        for step in range(0, STEPS, 2):
            part.net.collect_params().zero_grad()
            rows = part.backward(step) + part.backward(step + 1)
            trainer.step(rows)

    agree(train)


def test_a_rank_without_a_gradient_gets_the_others() -> None:
    """With ignore_stale_grad a parameter is updated if any rank had a gradient, and skipped if none had."""

    def train(part: Part) -> list[int]:
        trainer = part.trainer()
        for step in range(STEPS):
            skipped = step % 3 == 2  # by both ranks, except in the first step

            def forward(rank: int, x: Any, skipped: bool = skipped) -> Any:
                return part.net.leave_right_out(x) if skipped or rank == 1 else part.net(x)

            trainer.step(part.backward(step, forward), ignore_stale_grad=True)
        return [int(parameter.data()._fresh_grad) for parameter in part.net.collect_params().values()]

    for fresh in agree(train):
        assert not any(fresh)


def test_stale_gradients_are_refused_on_every_rank() -> None:
    """Stale gradients raise UserWarning, as in Gluon, but on every rank, so no rank waits for another."""

    def play(rank: int, job: Any) -> str:
        part = Part(rank, 2, "float64")
        trainer = part.trainer()
        trainer.step(part.backward(0))
        rows = part.backward(1, lambda rank, x: part.net.leave_right_out(x) if rank == 1 else part.net(x))
        with pytest.raises(UserWarning) as told:
            trainer.step(rows)
        return str(told.value)

    one, other = run_world(2, play, backend="threads")
    assert "1 of 2 ranks" in one
    assert "ignore_stale_grad=True" in other


def test_sparse_gradients() -> None:
    """Rows that one rank has, and rows that both have, are summed; other rows get no gradient."""

    def train(part: Part) -> None:
        random = np.random.RandomState(5)
        table = gluon.nn.Embedding(20, 4, sparse_grad=True, dtype="float32")
        table.initialize()
        table.weight.set_data(mx.nd.array(random.randn(20, 4)))
        part.net = table
        trainer = part.trainer(optimizer=("sgd", {"learning_rate": 0.1}), gradient_predivide_factor=2.0)
        for step in range(STEPS):
            rows = np.random.RandomState(step).randint(0, 15, size=(2, 3))
            losses = []
            with autograd.record():
                for rank in range(2):
                    if part.size == 1 or rank == part.rank:
                        losses.append((table(mx.nd.array(rows[rank])) ** 2).sum())
            autograd.backward(losses)
            trainer.step(6 // part.size)

    agree(train, tolerance=1e-6, kind="float32")


class Scaled(gluon.HybridBlock):  # type: ignore[misc]  # MXNet has no types
    """A float32 layer followed by a float16 factor, because MXNet on the CPU has no float16 layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body = gluon.nn.Dense(3, in_units=6)
            self.factor = self.params.get("factor", shape=(1, 3), dtype="float16")
        self.initialize()
        random = np.random.RandomState(3)
        for parameter in self.collect_params().values():
            parameter.set_data(mx.nd.array(random.randn(*parameter.shape), dtype=parameter.dtype))

    def hybrid_forward(self, F: Any, x: Any, factor: Any) -> Any:
        return F.broadcast_mul(self.body(x), F.cast(factor, "float32"))


def test_types_may_be_mixed() -> None:
    """float16 parameters with a master copy can be mixed with float32 parameters."""

    def train(part: Part) -> None:
        part.net = Scaled()
        settings = {"learning_rate": 0.01, "momentum": 0.9, "multi_precision": True}
        trainer = part.trainer(optimizer=("sgd", settings))
        for step in range(STEPS):
            trainer.step(part.backward(step))

    agree(train, tolerance=0.01, kind="float32")


def test_a_process_set_trains_by_itself() -> None:
    """Ranks 0 and 2 of three train together, and rank 1 trains alone."""
    alone = Part(0, 1, "float64")
    trainer = alone.trainer()
    for step in range(STEPS):
        trainer.step(alone.backward(step))

    def play(rank: int, job: Any) -> list[Any]:
        pair = ddl.add_process_set([0, 2])
        part = Part({0: 0, 2: 1, 1: 0}[rank], 2, "float64")
        trainer = part.trainer(process_set=pair)
        for step in range(STEPS):
            trainer.step(part.backward(step))
        return values(part.net)

    first, outside, third = run_world(3, play, backend="threads")
    for expected, one, other, apart in zip(values(alone.net), first, third, outside):
        np.testing.assert_allclose(one, expected, atol=1e-12)
        np.testing.assert_array_equal(one, other)
        assert np.abs(apart - one).max() > 1e-6


def test_two_trainers_are_replayed_together() -> None:
    """The auxiliary arrays of two trainers have different names, so both are replayed."""

    def play(rank: int, job: Any) -> int:
        mine: list[Any] = []
        for name in ("generator_", "judge_"):
            net = gluon.nn.Dense(3, in_units=4 + len(mine), use_bias=bool(mine), prefix=name)
            net.initialize(mx.init.Constant(1.0))
            mine.append((net, ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})))
        for _ in range(60):
            for net, trainer in mine:
                with autograd.record():
                    loss = net(mx.nd.full((2, net.weight.shape[1]), rank + 1.0)).sum()
                loss.backward()
                trainer.step(2)
        for net, _ in mine:
            np.testing.assert_allclose(net.weight.data().asnumpy(), 1.0 - 60 * 0.1 * 1.5, rtol=1e-4)
        return int(job.stats()["buckets_replayed"])

    assert min(run_world(2, play)) >= 40


def test_trainers_whose_parameters_are_called_alike_do_not_meet() -> None:
    """Equal names of parameters in two trainers, or in one list, do not clash; the first keeps the plain names."""

    def play(rank: int, job: Any) -> list[str]:
        trainers = []
        for _ in range(2):
            parameters = [gluon.Parameter("weight", shape=(3,)) for _ in range(2)]
            for parameter in parameters:
                parameter.initialize(mx.init.Constant(1.0))
            trainers.append((parameters, ddl.DistributedTrainer(parameters, "sgd", {"learning_rate": 0.1})))
        for _ in range(10):
            for parameters, trainer in trainers:
                with autograd.record():
                    loss = (parameters[0].data() + 2 * parameters[1].data()).sum() * (rank + 1.0)
                loss.backward()
                trainer.step(1)
        for parameters, _ in trainers:
            for factor, parameter in enumerate(parameters, 1):
                np.testing.assert_allclose(parameter.data().asnumpy(), 1.0 - 10 * 0.1 * 1.5 * factor, rtol=1e-4)
        return [name for _, trainer in trainers for name in trainer._names]

    one, other = run_world(2, play)
    assert one == other
    assert sorted(one) == ["gradient.weight", "gradient.weight#2", "gradient[1].weight", "gradient[1].weight#2"]


@pytest.mark.parametrize("request_of", ["write", "add"])
def test_one_parameter_of_two_layers_and_gradients_that_share_memory(request_of: str) -> None:
    """A weight shared by two layers, and gradients that are views of one array, are summed correctly."""

    def play(rank: int, job: Any) -> list[Any]:
        first = gluon.nn.Dense(3, in_units=3, use_bias=False)
        second = gluon.nn.Dense(3, in_units=3, use_bias=False, params=first.params)
        lone = gluon.Parameter("lone", shape=(9,))
        first.initialize(mx.init.Zero())
        lone.initialize(mx.init.Zero())
        trained = [*first.collect_params().values(), *second.collect_params().values(), lone]
        for parameter in trained:
            parameter.grad_req = request_of
        trainer = ddl.DistributedTrainer(trained[1:], "sgd", {"learning_rate": 1.0})
        ones = mx.nd.ones((1, 3))

        def backward() -> None:
            with autograd.record():
                loss = (first(ones) + second(ones)).sum() * (rank + 1.0) + lone.data().sum() * (rank + 1.0)
            loss.backward()

        for _ in range(3):
            for parameter in trained:
                parameter.zero_grad()
            backward()
            trainer.step(1)
        tied = first.weight.data().asnumpy().ravel().tolist()
        backward()
        flat = first.weight.grad().reshape((9,))
        lone._grad = [flat]  # one memory for the gradients of two parameters
        flat[:] = rank + 1.0
        trainer.allreduce_grads()
        return [tied, lone.data().asnumpy().tolist(), flat.asnumpy().tolist()]

    for tied, lone, flat in run_world(2, play):
        assert tied == [-9.0] * 9
        assert lone == [-4.5] * 9
        assert flat == [3.0] * 9  # a sum, because the update has not divided it yet


def test_states_are_saved_and_loaded(tmp_path: Path) -> None:
    """Momentum is restored from a saved state."""

    def train(part: Part) -> None:
        trainer = part.trainer()
        for step in range(STEPS // 2):
            trainer.step(part.backward(step))
        file = str(tmp_path / f"{part.size}.{part.rank}")
        trainer.save_states(file)
        begun = part.begun
        trainer = part.trainer(optimizer=("sgd", {"learning_rate": 7.0}))  # the saved state has another value
        part.begun = begun
        trainer.load_states(file)
        assert trainer.learning_rate == 0.1
        for step in range(STEPS // 2, STEPS):
            trainer.step(part.backward(step))

    agree(train)


def test_blocks_may_be_numbered_otherwise_elsewhere() -> None:
    """A rank that has created more blocks, so that Gluon numbers them otherwise, can still train with the others."""

    def play(rank: int, job: Any) -> list[Any]:
        if rank == 1:
            gluon.nn.Dense(1)
            Network()
        net = Network()
        trainer = ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        with autograd.record():
            loss = (net(mx.nd.ones((2, 6), dtype="float64")) * (rank + 1)).sum()
        loss.backward()
        trainer.step(2)
        return values(net)

    one, other = run_world(2, play, backend="threads")
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a, b)


def test_different_networks_are_refused() -> None:
    """Different networks raise an error that names the difference, before anything is reduced."""

    def play(rank: int, job: Any) -> str:
        net = gluon.nn.Dense(3 + rank, in_units=2)
        net.initialize()
        trainer = ddl.DistributedTrainer(net.collect_params(), "sgd")
        with autograd.record():
            loss = net(mx.nd.ones((2, 2))).sum()
        loss.backward()
        with pytest.raises(ValueError, match="rank 1 does not train the parameters of rank 0, but") as told:
            trainer.allreduce_grads()
        return str(told.value)

    one, other = run_world(2, play, backend="threads")
    assert one == other
    assert "(4, 2)" in one


class Gate(autograd.Function):  # type: ignore[misc]  # MXNet has no types
    """Lets gradients pass only after ``opened`` is set; ``passed`` tells whether it was set in time."""

    opened: threading.Event
    passed = False

    def forward(self, x: Any) -> Any:
        return x * 1.0

    def backward(self, grad: Any) -> Any:
        self.passed = self.opened.wait(STEP_S)
        return grad * 1.0


def test_the_first_allreduce_starts_before_the_last_gradient_is_computed() -> None:
    """The first layer's gradient waits until a bucket with the last layer's has run, in negotiation and in replay."""
    settings = {"overlap": "on", "first_bucket_bytes": 100_000}  # the last layer's gradients fill a bucket

    def play(rank: int, job: Any) -> tuple[list[bool], int]:
        first, last = gluon.nn.Dense(600, in_units=600), gluon.nn.Dense(600, in_units=600)  # of 1.4 MB each
        parameters = {}
        for layer in (first, last):
            layer.initialize()
            parameters.update(layer.collect_params().items())
        trainer = ddl.DistributedTrainer(parameters, "sgd", {"learning_rate": 1e-6})
        passed = []
        for _ in range(12):
            gate = Gate()
            gate.opened = threading.Event()
            watcher = threading.Thread(target=_open_after_a_batch, args=(job, gate.opened, _batches(job)))
            watcher.start()
            with autograd.record():
                loss = last(gate(first(mx.nd.ones((2, 600))))).sum()
            loss.backward()
            trainer.step(2)
            watcher.join()
            passed.append(gate.passed)
            if not gate.passed:
                break
        return passed, job.stats()["buckets_replayed"]

    for passed, replayed in run_world(2, play, backend="threads", settings=settings):
        assert passed == [True] * 12
        assert replayed > 0


def _batches(job: Any) -> int:
    counted = job.stats()
    return int(counted["buckets_replayed"] + counted["buckets_negotiated"])


def _open_after_a_batch(job: Any, opened: threading.Event, before: int) -> None:
    """Set ``opened`` when more than ``before`` buckets have ended."""
    until_s = time.monotonic() + STEP_S
    while _batches(job) == before and time.monotonic() < until_s:
        opened.wait(0.001)
    if _batches(job) > before:
        opened.set()


# --- invalid use


def test_arguments_that_do_not_fit() -> None:
    """Each invalid argument raises an error that says what to do."""

    def play(rank: int, job: Any) -> None:
        net = Network()
        parameters = net.collect_params()
        with pytest.raises(ValueError, match="gradient_predivide_factor must be greater than 0"):
            ddl.DistributedTrainer(parameters, "sgd", gradient_predivide_factor=0.0)
        with pytest.raises(ValueError, match="num_groups must be a whole number"):
            ddl.DistributedTrainer(parameters, "sgd", num_groups=-1)
        with pytest.raises(ValueError, match="prefix must be a string"):
            ddl.DistributedTrainer(parameters, "sgd", prefix=3)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(ValueError, match=r"use Compression\.none"):
            ddl.DistributedTrainer(parameters, "sgd", compression=3)
        with pytest.raises(ValueError, match="is not registered"):
            ddl.DistributedTrainer(parameters, "sgd", process_set=ddl.ProcessSet([0, 1]))
        both = gluon.nn.Dense(1, in_units=1)
        both.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        with pytest.raises(ValueError, match="a rank trains on one"):
            ddl.DistributedTrainer(both.collect_params(), "sgd")
        sparse = gluon.Parameter("table", shape=(4, 2), stype="row_sparse", grad_stype="row_sparse")
        sparse.initialize()
        with pytest.raises(ValueError, match="stype='default'"):
            ddl.DistributedTrainer([sparse], "sgd")
        with pytest.warns(UserWarning, match="the optimizer inside the DistributedOptimizer"):
            trainer = ddl.DistributedTrainer(parameters, ddl.DistributedOptimizer(mx.optimizer.create("sgd")))
        assert type(trainer.optimizer).__mro__[0] is mx.optimizer.SGD

    run_world(1, play, backend="threads")


def test_before_init() -> None:
    """Creating a trainer before ``init`` raises a named error."""
    with pytest.raises(ValueError, match="call init"):
        ddl.DistributedTrainer(Network().collect_params(), "sgd")


UNEVEN = (3, 5)  # rows of the ranks


@pytest.mark.parametrize("way", ["number", "function", "share"])
def test_weights_of_rows(way: str) -> None:
    """Ranks with 3 and 5 rows: the average is that over the 8 rows of one process."""

    def train(part: Part) -> None:
        rows = UNEVEN[part.rank]
        options: dict[str, Any] = {
            "weight": {"number": 1, "function": lambda: rows, "share": ddl.Share(rows, 8, 2)}[way]
        }
        trainer = part.trainer(**(options if part.size > 1 else {}))
        for step in range(STEPS):
            ((_, x, y),) = part.shards(step, 1)
            if part.size > 1:
                own = slice(0, 3) if part.rank == 0 else slice(3, 8)
                x, y = x[own], y[own]
                if way == "number":
                    trainer.weight = rows
            with autograd.record():
                loss = ((part.net(x) - y) ** 2).sum() / len(x)
            loss.backward()
            trainer.step(1)

    agree(train)


def test_values_of_weight_zero_count_nothing() -> None:
    """Even NaN; if all weights are 0, all ranks are told, and the next step is as usual."""

    def play(rank: int, job: Any) -> None:
        net = gluon.nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One())
        trainer: Any = ddl.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, weight=rank)

        def step(factor: float) -> list[float]:
            with autograd.record():
                loss = (net(mx.nd.ones((1, 2))) * factor).sum()
            loss.backward()
            trainer.step(1)
            found: list[float] = net.weight.data().asnumpy().ravel().tolist()
            return found

        assert step(2.0 if rank else float("nan")) == [-1.0, -1.0]
        trainer.weight = 0
        with pytest.raises(ValueError, match="weights of all ranks are 0"):
            step(1.0)
        trainer.weight = 3
        assert step(1.0) == [-2.0, -2.0]

    run_world(2, play)


def test_wrong_weights_are_told() -> None:
    """By name, where they are given."""

    def play(rank: int, job: Any) -> None:
        params = Network().collect_params()
        for options, text in (
            ({"weight": -1}, "not negative"),
            ({"weight": "1"}, "is a str"),
            ({"weight": 1, "gradient_predivide_factor": 2.0}, "prescale_factor=0.5"),
            ({"weight": ddl.Share(1, 2, 5)}, "for 5 ranks"),
        ):
            with pytest.raises(ValueError, match=text):
                ddl.DistributedTrainer(params, "sgd", **options)
        plain: Any = ddl.DistributedTrainer(params, "sgd")
        assert plain.weight is None
        with pytest.raises(ValueError, match="averages without weights"):
            plain.weight = 2

    run_world(2, play)
