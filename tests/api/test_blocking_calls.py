"""Blocking collectives with names: described once, started again in each step, with whatever tensor the step has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.errors import InvalidArgument
from ddlcore.process.job import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(120)

STEPS = 30
SIZE = 2


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_every_kind_with_other_tensors_in_each_step(backend: str) -> None:
    """Values and numbers of rows differ from step to step. No result is changed by a later step."""

    def train(rank: int, job: Job) -> tuple[int, int]:
        results: list[tuple[Any, Any]] = []
        messages = requests = 0
        for step in range(STEPS):
            if step == STEPS // 2:
                messages, requests = ddl.stats()["control_messages"], len(job.persistent_requests)
            results += _step(rank, step)
        for got, wanted in results:  # at the end: a result that a later step writes to would be found
            np.testing.assert_array_equal(got, wanted)
        return ddl.stats()["control_messages"] - messages, len(job.persistent_requests) - requests

    with World(SIZE, backend=backend, settings={"replay": True}) as world:
        assert world.run(train) == [(0, 0)] * SIZE


def _step(rank: int, step: int) -> list[tuple[Any, Any]]:
    """Run each kind once. Return pairs of a result and what it must be."""
    rows = [(step + r) % 3 for r in range(SIZE)]
    mine = np.full((rows[rank], 2), 10 * step + rank)
    gathered = ddl.allgather(mine, name="rows")
    results = [(gathered, np.concatenate([np.full((n, 2), 10 * step + r) for r, n in enumerate(rows)]))]
    results.append((ddl.broadcast(np.full(3, step + rank), 1, name="new"), np.full(3, step + 1)))
    place = np.full((2, 2), float(step + rank))
    assert ddl.broadcast_(place, 0, name="place") is place
    results.append((place, np.full((2, 2), float(step))))
    sent = np.array([100 * rank + step, *[100 * rank + step + 1] * rows[0]])
    came, splits = ddl.alltoall(sent, [1, rows[0]], name="cells")
    each = [1, rows[0]][rank]
    results.append((came, np.concatenate([np.full(each, 100 * r + step + rank) for r in range(SIZE)])))
    results.append((splits, [each] * SIZE))
    summed = ddl.reducescatter(np.arange(5, dtype=np.int64) + step, name="part", op=ddl.Sum)
    results.append((summed, (np.arange(5) + step)[[slice(0, 3), slice(3, 5)][rank]] * 2))
    return results


def test_a_call_of_another_kind_of_tensor_takes_the_name_over() -> None:
    """A name may be used for a tensor of another type or shape, and for another root or operation.

    One rank may make the blocking call and the other rank the asynchronous call with the same name.
    """

    def train(rank: int, job: Job) -> None:
        for _ in range(3):
            for dtype in (np.float32, np.int16):
                got = ddl.allgather(np.full((1, 2), rank, dtype), name="x")
                assert got.dtype == dtype
                assert got.tolist() == [[0, 0], [1, 1]]
                assert ddl.allgather(np.full((1, 3), rank, dtype), name="x").shape == (2, 3)
            for root in (0, 1):
                assert ddl.broadcast(np.array([rank + 5]), root, name="x").tolist() == [root + 5]
            for op, wanted in ((ddl.Sum, 3.0), (ddl.Max, 2.0), (ddl.Average, 1.5)):
                assert ddl.reducescatter(np.full(2, rank + 1.0), name="x", op=op).tolist() == [wanted]
            if rank == 0:
                assert ddl.allgather_async(np.array([rank]), name="y").wait().tolist() == [0, 1]
            else:
                assert ddl.allgather(np.array([rank]), name="y").tolist() == [0, 1]

    with World(SIZE, settings={"replay": True}) as world:
        world.run(train)


def test_wrong_arguments_are_refused_by_every_call() -> None:
    """A wrong call is refused even if an earlier call with the same name was right."""

    def train(rank: int, job: Job) -> None:
        for _ in range(2):
            ddl.broadcast(np.ones(2), 0, name="x")
            with pytest.raises(InvalidArgument, match="root_rank=7"):
                ddl.broadcast(np.ones(2), 7, name="x")
            with pytest.raises(InvalidArgument, match="at least one dimension"):
                ddl.allgather(np.array(1.0), name="x")
            frozen = np.ones(2)
            frozen.flags.writeable = False
            with pytest.raises(InvalidArgument, match="read-only"):
                ddl.broadcast_(frozen, 0, name="x")
            ddl.alltoall(np.ones(SIZE), name="x")
            with pytest.raises(InvalidArgument, match="do not add up"):
                ddl.alltoall(np.ones(SIZE), [0, 1], name="x")
            with pytest.raises(InvalidArgument, match="name"):
                ddl.allgather(np.ones(2), name="x" * 5000)
            with pytest.raises(InvalidArgument, match="is a string"):
                ddl.allgather(np.ones(2), name=5)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="average of bool"):
                ddl.reducescatter(np.ones(2, bool), name="x")

    with World(SIZE) as world:
        world.run(train)


def test_a_factor_is_read_at_every_call() -> None:
    """If the factor is an array, its value may change between two calls."""

    def train(rank: int, job: Job) -> list[float]:
        factor, sums = np.array(0.5), []
        for _ in range(4):
            sums.append(float(ddl.reducescatter(np.ones(2), name="x", op=ddl.Sum, prescale_factor=factor)[0]))
            factor *= 2
        return sums

    with World(SIZE) as world:
        assert world.run(train) == [[1.0, 2.0, 4.0, 8.0]] * SIZE


def test_a_mismatch_is_told_to_both_ranks_and_the_name_is_free_again() -> None:
    """The error belongs to the call; the next call with the name succeeds."""

    def train(rank: int, job: Job) -> None:
        for _ in range(2):
            with pytest.raises(ddl.MismatchError, match="x"):
                ddl.allgather(np.ones((1, 2 + rank)), name="x")
            assert ddl.allgather(np.ones((1, 2)), name="x").shape == (SIZE, 2)

    with World(SIZE) as world:
        world.run(train)
