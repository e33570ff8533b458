"""Runs collectives on ranks that are threads; each rank runs them eagerly, in a tf.function and in a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from ddlcore.api import use_job
from ddlcore.testing import run_world

__all__ = ["MODES", "SIZE", "Seat", "evaluate", "ranks", "seated", "seats"]

SIZE = 3
MODES = pytest.mark.parametrize("mode", ["eager", "function", "session"])


def ranks(function: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Call ``function(rank)`` on every rank of a new world, and return the results by rank."""
    return run_world(size, lambda rank, job: function(rank), deadline_s=90.0)


class Seat:
    """A rank on whose behalf graphs run: its job and, if the job is elastic, its member.

    The job may change between two runs of a graph.
    """

    def __init__(self, job: Any, member: Any = None) -> None:
        self.job = job
        self.member = member


_here = threading.local()  # .seat: that of this thread


@contextmanager
def seats() -> Iterator[None]:
    """Let graphs that are traced on a seat act for it when they run.

    The threads of TensorFlow's pools belong to no rank. Without this, questions that a graph asks have no answer there.
    """
    plain = tf.numpy_function

    def numpy_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seat: Seat | None = getattr(_here, "seat", None)
        if seat is None:
            return plain(function, *args, **kwargs)

        def run(*arrays: Any) -> Any:
            with use_job(seat.job, seat.member):
                return function(*arrays)

        return plain(run, *args, **kwargs)

    with mock.patch.object(tf, "numpy_function", numpy_function):
        yield


@contextmanager
def seated(seat: Seat) -> Iterator[None]:
    """Make this thread, and the graphs that it traces, act for ``seat`` within the context. It needs ``seats``."""
    _here.seat = seat
    try:
        with use_job(seat.job, seat.member):
            yield
    finally:
        del _here.seat


def evaluate(mode: str, build: Callable[..., Any], *tensors: Any, times: int = 2) -> Any:
    """Return what ``build(*tensors)`` gives, as numpy arrays.

    A graph is run ``times`` times, and the last result is returned.

    Sessions have one inter-op thread, so a collective that blocked it would show as a test that does not end.
    """
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if mode == "session":
        return _in_session(build, values, times)
    function = tf.function(build) if mode == "function" else build
    for _ in range(times if mode == "function" else 1):
        result = function(*values)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), result, expand_composites=True)


def _in_session(build: Callable[..., Any], values: list[Any], times: int) -> Any:
    v1 = tf.compat.v1
    config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default():
        places = [v1.placeholder(value.dtype, value.shape) for value in values]
        result = build(*places)
        with v1.Session(config=config) as session:
            for _ in range(times):
                arrays = session.run(result, {place: value.numpy() for place, value in zip(places, values)})
    return arrays
