"""After an exception within a step, the step is repeated or all ranks get an error; values never differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from ddl_mxnet.reducer import Fence
from mxnet import gluon

from ddlcore.errors import DdlInternalError
from ddlcore.testing import run_world
from plugins.ddl_mxnet.tests.launching import PROGRAMS, launch

pytestmark = pytest.mark.timeout(120)


class Interrupted(Exception):
    """An exception as a signal's handler may raise it."""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_a_signal_while_gradients_are_under_way(kind: str, tmp_path: Path) -> None:
    """The peer gets the gradients that were sent, whatever is computed later; the next step raises on both ranks."""
    shown = launch(2, PROGRAMS / "interrupted.py", kind, str(tmp_path))
    told = re.findall(r"\[(\d)\] told: .*has interrupted a step on rank 0", shown)
    assert sorted(told) == ["0", "1"], shown


def stepping(rank: int) -> tuple[Any, Any]:
    """Return a parameter with gradient ``rank + 1``, and its trainer, which has made one step."""
    weight = gluon.Parameter("weight", shape=(4,))
    weight.initialize(mx.init.Zero())
    trainer = ddl.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0})
    compute(weight, rank)
    trainer.step(1)
    compute(weight, rank)
    return weight, trainer


def compute(weight: Any, rank: int) -> None:
    with mx.autograd.record():
        loss = (weight.data() * (rank + 1.0)).sum()
    loss.backward()


def test_an_exception_before_anything_was_sent_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing was sent, the step can be called again and gives the right values."""
    interrupt: set[int] = set()
    wait = Fence.wait

    def waiting(fence: Fence) -> None:
        wait(fence)
        if id(fence) in interrupt:
            interrupt.clear()
            raise Interrupted

    monkeypatch.setattr(Fence, "wait", waiting)

    def play(rank: int, job: Any) -> None:
        weight, trainer = stepping(rank)
        if rank == 0:
            interrupt.add(id(trainer._plan.fences[-1]))
            with pytest.raises(Interrupted):
                trainer.step(1)
        trainer.step(1)
        np.testing.assert_array_equal(weight.data().asnumpy(), np.full(4, -3.0))

    run_world(2, play, backend="threads", deadline_s=90.0)


@pytest.mark.parametrize("where", ["names", "reduction", "update"])
def test_an_exception_after_something_was_sent_is_told_to_all(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks get an error wherever a step is interrupted after it has sent something.

    The places: while names are agreed on, after the reduction, and within the update.
    """
    interrupted: list[Any] = []
    inner = {"names": "in_one", "reduction": "reduce", "update": "_update"}[where]

    def play(rank: int, job: Any) -> None:
        weight = gluon.Parameter("weight", shape=(4,))
        weight.initialize(mx.init.Zero())
        trainer = ddl.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0})
        if rank == 0:
            owner = trainer if where == "update" else trainer._ddl
            interrupt(owner)
        compute(weight, rank)
        if rank == 0:
            with pytest.raises(Interrupted):
                trainer.step(1)
            compute(weight, rank)
            with pytest.raises(DdlInternalError, match="has interrupted a step on rank 0"):
                trainer.step(1)
        else:
            with pytest.raises(DdlInternalError, match="has interrupted a step on rank 0"):
                two_steps(trainer, weight)

    def two_steps(trainer: Any, weight: Any) -> None:
        trainer.step(1)
        compute(weight, 1)
        trainer.step(1)

    def interrupt(owner: Any) -> None:
        bare = getattr(owner, inner)

        def method(*args: Any, **kwargs: Any) -> Any:
            if where == "names":
                return _Torn(bare(*args, **kwargs))
            if where == "reduction":
                bare(*args, **kwargs)
                raise Interrupted
            with owner._ddl.in_one():
                raise Interrupted

        interrupted.append(owner)
        setattr(owner, inner, method)

    run_world(2, play, backend="threads", deadline_s=90.0)
    assert len(interrupted) == 1


class _Torn:
    """A context that ends with an exception."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *_: Any) -> None:
        try:
            raise Interrupted
        except Interrupted as error:
            self._inner.__exit__(type(error), error, error.__traceback__)
            raise
