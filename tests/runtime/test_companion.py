"""What a framework runs beside a job, and what it is told when an operation ends."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ddlcore.api import Companion, Operations
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.errors import DdlInternalError
from ddlcore.testing import run_world
from ddlcore.types import Sum


class Told(Companion):
    """Keeps what happens."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self.events: list[str] = []

    def settle(self) -> None:
        self.events.append(f"settle, closed={self.job.closed}")

    def close(self) -> None:
        self.events.append(f"close, closed={self.job.closed}")


@pytest.mark.parametrize("settle", [True, False])
def test_a_companion_is_one_and_goes_with_its_job(settle: bool) -> None:
    """It settles while the job runs, if the program has come to its end, and is closed after it."""

    def play(rank: int, job: Any) -> list[str]:
        told = job.companion(Told)
        assert job.companion(Told) is told
        job.shutdown(settle=settle)
        return list(told.events)

    expected = ["settle, closed=False"] * settle + ["close, closed=True"]
    assert run_world(2, play) == [expected] * 2


def test_a_call_is_made_when_an_operation_is_over() -> None:
    """Once, whether it ends well or not; at once where it is over; and with no lock held."""
    operations = Operations(NumpyAdapter())

    def play(rank: int, job: Any) -> None:
        for shape, fails in ((3, False), (3 + rank, True)):
            called = threading.Event()
            calls: list[bool] = []
            handle = operations.grouped_allreduce_async([np.ones(shape), np.ones(2)], op=Sum, name="g")

            def call(handle: Any = handle, calls: Any = calls, called: Any = called) -> None:
                calls.append(handle.poll())
                called.set()

            handle.then(call)
            assert called.wait(40.0)
            if fails:
                with pytest.raises(DdlInternalError):
                    handle.wait()
            else:
                handle.wait()
            assert (handle.failure is not None) is fails
            handle.then(call)
            assert calls == [True, True]

    run_world(2, play)


def test_a_handle_that_could_not_be_handed_over() -> None:
    """Whoever waits gets the error."""

    class Refusing(Operations):
        def hand_over(self, job: Any, handle: Any, entries: Any, waits: bool) -> None:
            handle.refuse(OSError("no"))

    def play(rank: int, job: Any) -> None:
        handle = Refusing(NumpyAdapter()).allreduce_async(np.ones(1))
        assert handle.poll()
        with pytest.raises(OSError, match="no"):
            handle.wait()

    run_world(1, play)
