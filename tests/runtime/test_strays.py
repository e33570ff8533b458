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


@BACKENDS
def test_calls_after_an_unanswered_one_are_not_paired_with_those_of_other_ranks(backend: str) -> None:
    """One rank makes another call without waiting for it, and goes on.

    The others' usual call in its place is a mismatch, and each later call meets the call with the same number, as it
    does outside of replay. Rank 1 got the sum of its next call and the others' present one: a result before the
    mismatch was found. Each value tells its step.
    """

    def train(rank: int, job: Job) -> list[float | str]:
        for _ in range(STEPS):
            assert total(4) == 3
        odd = ddl.allreduce_async(np.zeros(5), op=ddl.Sum) if rank == 1 else None
        seen: list[float | str] = []
        for step in range(100, 103):
            try:
                seen.append(float(ddl.allreduce(np.full(4, float(step)), op=ddl.Sum)[0]))
            except MismatchError:
                seen.append("mismatch")
        if odd is None:
            return [*seen, total(4)]
        with pytest.raises(MismatchError):
            odd.wait()
        return ["mismatch", *seen]

    # The others' steps 101 and 102 meet rank 1's 100 and 101, and their last call, of 1.0, meets rank 1's 102.
    assert run(train, backend) == [["mismatch", 302.0, 305.0, 104.0]] * 3


@BACKENDS
def test_calls_after_one_that_needs_an_answer_keep_their_order(backend: str) -> None:
    """Gathers whose sizes change are answered by the coordinator each time; the calls between them have slots."""

    def train(rank: int, job: Job) -> int:
        for step in range(4 * STEPS):
            sizes = [1 + (step + other) % 3 for other in range(3)]
            gathers = [ddl.allgather_async(np.full(sizes[rank], float(step))) for _ in range(2)]
            sums = [ddl.allreduce_async(np.full(4, float(step + i)), op=ddl.Sum) for i in range(2)]
            gathers += [ddl.allgather_async(np.full(sizes[rank], float(-step)))]
            assert [float(one.wait()[0]) for one in sums] == [3.0 * step, 3.0 * (step + 1)]
            for one, value in zip(gathers, (step, step, -step)):
                assert one.wait().tolist() == [float(value)] * sum(sizes)
        return int(job.stats()["buckets_replayed"])

    assert min(run(train, backend)) > STEPS
