"""When a signal's handler raises during a step, all ranks get the results they would have got, or all get an error."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ddl_tf.exchange import Exchange
from ddl_tf.reducer import Reducer
from ddl_tf.reduction import Reduction

from ddlcore.errors import DdlInternalError
from ddlcore.testing import run_world
from plugins.ddl_tf.tests.launching import PROGRAMS, launch

pytestmark = pytest.mark.timeout(150)


class Interrupted(Exception):
    """An exception as a signal's handler may raise it."""


@pytest.mark.long
@pytest.mark.processes
def test_signals_in_every_way_to_train(tmp_path: Path) -> None:
    """Training with a tape, with Keras, in a function and in a session gives the same values as without signals.

    If an interrupt separates a reduction from its update, a Keras optimizer ends the job with a clear error on both
    ranks.
    """
    shown = launch(2, PROGRAMS / "interrupted.py", str(tmp_path), timeout_s=130.0)
    for way in ("tape", "tape, sparse", "keras", "function", "session"):
        assert len(re.findall(rf"(?m)\[\d\] held {way}$", shown)) == 2, shown
    assert sorted(re.findall(r"\[(\d)\] told: .*a step of rank 0 was interrupted", shown)) == ["0", "1"], shown


def test_an_interrupt_while_sending_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt while tensors are sent, the next call raises, and so does the waiting peer.

    Nobody can say how much has been sent.
    """
    gather = Exchange.gather
    interrupts: list[int] = []

    def gathering(exchange: Exchange, first: int, *tensors: Any) -> Any:
        if exchange.job.rank == 0 and not interrupts:
            interrupts.append(first)
            raise Interrupted
        return gather(exchange, first, *tensors)

    monkeypatch.setattr(Exchange, "gather", gathering)

    def play(rank: int, job: Any) -> None:
        reducer = Reducer(Reduction(), "sending")
        variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros((4, 2)))]
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), tf.constant([4, 2]))
        if rank == 0:
            with pytest.raises(Interrupted):
                reducer.reduce([tf.ones(3), slices], variables)
        with pytest.raises(DdlInternalError, match="a step of rank 0 was interrupted"):
            reducer.reduce([tf.ones(3), slices], variables)

    run_world(2, play, deadline_s=90.0)


def test_an_interrupt_before_sending_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt before anything was sent, the next call begins that step normally."""
    made_ready = Exchange._made_ready
    interrupts: list[int] = []

    def making_ready(exchange: Exchange, number: int, tensor: Any) -> Any:
        if exchange.job.rank == 0 and not interrupts:
            interrupts.append(number)
            raise Interrupted
        return made_ready(exchange, number, tensor)

    monkeypatch.setattr(Exchange, "_made_ready", making_ready)

    def play(rank: int, job: Any) -> list[float]:
        reducer = Reducer(Reduction(), "before")
        variable = tf.Variable(tf.zeros(3))
        if rank == 0:
            with pytest.raises(Interrupted):
                reducer.reduce([tf.fill((3,), 77.0)], [variable])
        return [float(reducer.reduce([tf.fill((3,), step + rank)], [variable])[0][0]) for step in (1.0, 2.0)]

    assert run_world(2, play, deadline_s=90.0) == [[1.5, 2.5]] * 2


def test_every_part_of_a_run_that_is_given_up_says_why() -> None:
    """Every part of a run that was given up raises the reason.

    Several threads send the parts, and TensorFlow shows the first error only.
    """

    def play(rank: int, job: Any) -> None:
        exchange = Reducer(Reduction(), "late")._exchange("late", 3, "", None)
        part, told = np.ones(3, np.float32), "a step of rank 0 was interrupted"
        if rank == 0:
            exchange.send(0, part)
            with pytest.raises(DdlInternalError, match=told):
                exchange.send(0, part)
            for late in (partial(exchange.send, 1, part), partial(exchange.gather, 3, part)):
                with pytest.raises(DdlInternalError, match=told):
                    late()
        else:
            for number in range(3):
                exchange.send(number, part)
            with pytest.raises(DdlInternalError, match=told):
                exchange.take()

    run_world(2, play, deadline_s=90.0)


def test_a_run_of_a_function_that_failed_after_it_had_sent_is_told_to_all() -> None:
    """If an operation fails on one rank between two parts of a step, the next run ends the job on both ranks.

    The error on both ranks says why.
    """

    def play(rank: int, job: Any) -> None:
        reducer = Reducer(Reduction(groups=2), "parts")
        variables = [tf.Variable(tf.zeros((300, 100))) for _ in range(2)]
        broken = tf.Variable(rank == 0)

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def step() -> Any:
            late = tf.ones((300, 100))
            for _ in range(60):
                late = tf.transpose(tf.transpose(late) + 0.0)
            with tf.control_dependencies([tf.debugging.assert_equal(broken, False) if rank == 0 else tf.no_op()]):
                late = tf.identity(late)
            return reducer.reduce([late, tf.ones((300, 100))], variables)

        if rank == 0:
            with pytest.raises(tf.errors.InvalidArgumentError):
                step()
            broken.assign(False)
        try:
            results = step()
        except (tf.errors.OpError, DdlInternalError) as error:
            assert "a step of rank 0 was interrupted" in str(error)  # noqa: PT017 - or else it was exact
        else:
            assert [float(one[5, 5]) for one in results] == [1.0, 1.0]

    run_world(2, play, deadline_s=90.0)
