"""Optimizers and trainers whose classes override methods update by averages, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import pytest
from mxnet import autograd, gluon

from ddlcore.errors import InvalidArgument
from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(240)


class Own(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
    """Ignores ``rescale_grad``."""

    def create_state(self, index: Any, weight: Any) -> None:
        return None

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        weight[:] -= grad


class Multi(Own):
    """Overrides only what MXNet calls."""

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        several = isinstance(index, (list, tuple))
        for one, its in zip(weight, grad) if several else [(weight, grad)]:
            one[:] -= its


class Rescaling(Own):
    """Multiplies by ``rescale_grad``."""

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        weight[:] -= grad * self.rescale_grad


class Outer(Own):
    """Passes gradients on to an optimizer that has a ``rescale_grad`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mx.optimizer.SGD(learning_rate=1.0)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self.inner.update(index, weight, grad, state)


OPTIMIZERS = pytest.mark.parametrize("kind", [Own, Multi, Rescaling, Outer])


def stepped(trainer_class: Any, kind: Callable[[], Any], rank: int, **options: Any) -> float:
    """Return by how much a step lowers a parameter whose gradients are 1 and 7."""
    param = gluon.Parameter("w", shape=(1,))
    param.initialize(mx.init.Constant(10.0))
    trainer = trainer_class([param], kind(), **options)
    with autograd.record():
        loss = param.data() * (1.0 + 6.0 * rank)
    loss.backward()
    trainer.step(1)
    return 10.0 - float(param.data().asnumpy()[0])


@OPTIMIZERS
@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_an_optimizer_averages_once(kind: Callable[[], Any], predivide: float) -> None:
    """The average of 1 and 7 is 4; the sum would be 8."""

    def play(rank: int, job: Any) -> list[float]:
        optimizer = ddl.DistributedOptimizer(kind(), gradient_predivide_factor=predivide)
        weight, update = mx.nd.array([10.0]), mx.optimizer.get_updater(optimizer)
        steps = []
        for _ in range(2):
            update([0], [mx.nd.array([1.0 + 6.0 * rank])], [weight])
            steps.append(10.0 - float(weight.asnumpy()[0]))
        return steps

    assert run_world(2, play) == [[4.0, 8.0]] * 2


@OPTIMIZERS
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 2.0}, {"weight": 1.0}])
def test_a_trainer_averages_for_any_optimizer(kind: Callable[[], Any], options: dict[str, Any]) -> None:
    assert run_world(2, lambda rank, job: stepped(ddl.DistributedTrainer, kind, rank, **options)) == [4.0, 4.0]


class Unscaled(ddl.DistributedTrainer):
    """Its ``update`` does not compute ``rescale_grad``."""

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        self._update(ignore_stale_grad)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        self.allreduce_grads()
        self.update(batch_size)


class Parts(ddl.DistributedTrainer):
    """Its ``step`` makes the two parts of a step itself."""

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        self.allreduce_grads()
        self.update(batch_size)


@pytest.mark.parametrize("trainer", [Unscaled, Parts])
@pytest.mark.parametrize(
    "kind", [Own, Rescaling, lambda: mx.optimizer.SGD(learning_rate=1.0)], ids=["own", "rescaling", "of-mxnet"]
)
def test_a_derived_trainer_averages_once(trainer: Any, kind: Callable[[], Any]) -> None:
    assert run_world(2, lambda rank, job: stepped(trainer, kind, rank)) == [4.0, 4.0]


def trainer_with(**methods: Callable[..., Any]) -> type:
    return type("Derived", (ddl.DistributedTrainer,), methods)


def by_updater(self: Any, *_: Any) -> None:
    self._updaters[0](0, self._params[0].grad(), self._params[0].data())


@pytest.mark.parametrize(
    "trainer",
    [
        trainer_with(step=lambda self, size, ignore=False: self._update(ignore)),
        trainer_with(step=lambda self, size, ignore=False: self.update(size, ignore)),
        trainer_with(_allreduce_grads=lambda self: None),
        trainer_with(
            allreduce_grads=lambda self: None, step=lambda self, size: [self.allreduce_grads(), self.update(size)]
        ),
        trainer_with(step=by_updater),
        trainer_with(_update=by_updater),
    ],
    ids=["step to _update", "step to update", "no reduction", "no allreduce_grads", "step to updater", "own _update"],
)
def test_a_derived_trainer_that_leaves_the_reduction_out_is_refused(trainer: Any) -> None:
    """Before, each rank made a step by its own gradients."""

    def play(rank: int, job: Any) -> str:
        with pytest.raises(InvalidArgument) as info:
            stepped(trainer, Rescaling, rank)
        return str(info.value)

    assert all("DistributedTrainer" in message for message in run_world(2, play))


def test_one_process_may_update_without_a_reduction() -> None:
    trainer = trainer_with(step=lambda self, size, ignore=False: self.update(size, ignore))
    assert run_world(1, lambda rank, job: stepped(trainer, Rescaling, rank)) == [1.0]
