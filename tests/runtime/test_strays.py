"""In a loop of calls without names that is replayed, a rank makes another call. Only their order pairs such calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.errors import MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(120)

STEPS = 12  # enough for replay
LATE_S = 1.6  # longer than a rank waits before it asks to leave replay

BACKENDS = pytest.mark.parametrize("backend", ["shm", "threads"])


def run(body: Callable[[int, Job], Any], backend: str) -> list[Any]:
    with World(3, backend=backend, settings={"replay": True}) as world:
        results: list[Any] = world.run(body)
        return results


def total(count: int) -> float:
    reduced: np.ndarray[Any, Any] = ddl.allreduce(np.full(count, 1.0), op=ddl.Sum)
    return float(reduced[0])


@BACKENDS
@pytest.mark.parametrize("other", ["more elements", "another kind", "asynchronous"])
def test_another_call_in_the_place_of_the_usual_one_is_a_mismatch(backend: str, other: str) -> None:
    """The other ranks are in the usual collective already and wait for this rank; it raised nothing, on no rank."""

    def asynchronous() -> None:
        handle = ddl.allreduce_async(np.zeros(5), op=ddl.Sum)
        until_s = time.monotonic() + 60
        while not handle.poll() and time.monotonic() < until_s:
            time.sleep(0.01)
        handle.wait()

    others = {
        "more elements": lambda: total(5),
        "another kind": lambda: ddl.broadcast(np.zeros(4), 0),
        "asynchronous": asynchronous,
    }

    def train(rank: int, job: Job) -> None:
        for _ in range(2):
            for _ in range(STEPS):
                assert total(4) == 3
            with pytest.raises(MismatchError, match="the ranks disagree"):
                total(4) if rank != 1 else others[other]()
        assert total(4) == 3

    run(train, backend)


@BACKENDS
def test_a_further_call_may_come_late(backend: str) -> None:
    """All ranks make it, but one much later. The values are right, and the loop is replayed again afterwards."""

    def train(rank: int, job: Job) -> int:
        for _ in range(STEPS):
            assert total(4) == 3
        for turn in range(3):
            if rank == turn:
                time.sleep(LATE_S)
            assert total(7) == 3
            for _ in range(2 * STEPS):
                assert total(4) == 3
        before = job.stats()["buckets_replayed"]
        for _ in range(STEPS):
            assert total(4) == 3
        return int(job.stats()["buckets_replayed"] - before)

    assert run(train, backend) == [STEPS] * 3
