"""Allgather and alltoall in replay: the ranks tell each other the sizes by the transport, without the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ddl_conform.threads import ThreadsTransport

import ddlcore as ddl
from ddlcore.api import objects
from ddlcore.contracts.memory import view
from ddlcore.errors import TransportError
from ddlcore.process.job import Job
from ddlcore.testing import World
from ddlcore.types import Buffer, DType

pytestmark = pytest.mark.timeout(120)

REPLAY = {"replay": True}
STEPS = 40
SETTLED = 20  # steps after which the schedule runs


def _gather(rank: int, size: int, step: int, name: str | None) -> None:
    """Gather so many rows of each rank that they differ between ranks and steps, and are often none."""
    rows = [(step + other) % 4 for other in range(size)]
    got = ddl.allgather(np.full((rows[rank], 2), 100 * step + rank), name=name and f"{name}.gather")
    expected = np.concatenate([np.full((count, 2), 100 * step + other) for other, count in enumerate(rows)])
    np.testing.assert_array_equal(got, expected)


def _exchange(rank: int, size: int, step: int, name: str | None) -> None:
    splits = [[(step + sender * other) % 3 for other in range(size)] for sender in range(size)]
    mine = np.concatenate([np.full(count, 10 * rank + other) for other, count in enumerate(splits[rank])])
    got, received = ddl.alltoall(mine, splits[rank], name=name and f"{name}.exchange")
    np.testing.assert_array_equal(received, [sent[rank] for sent in splits])
    expected = np.concatenate([np.full(sent[rank], 10 * other + rank) for other, sent in enumerate(splits)])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_sizes_that_differ_in_each_step_need_no_message(backend: str, name: str | None) -> None:
    """By names and without; nor do they interrupt the allreduce beside them."""
    size = 3

    def train(rank: int, job: Job) -> tuple[int, int]:
        messages = replayed = 0
        for step in range(STEPS):
            if step == SETTLED:
                messages, replayed = ddl.stats()["control_messages"], ddl.stats()["buckets_replayed"]
            _gather(rank, size, step, name)
            total = ddl.allreduce(np.full(5, float(rank + step)), name=name and f"{name}.sum", op=ddl.Sum)
            np.testing.assert_array_equal(total, sum(range(size)) + size * step)
            _exchange(rank, size, step, name)
        return ddl.stats()["control_messages"] - messages, ddl.stats()["buckets_replayed"] - replayed

    with World(size, backend=backend, settings=REPLAY) as world:
        assert world.run(train) == [(0, 3 * (STEPS - SETTLED))] * size


def test_a_tensor_outside_the_schedule_finds_rows_in_it() -> None:
    """The ranks leave the schedule together, some of them in the middle of a gather with dummy data, and come back."""
    size = 3

    def train(rank: int, job: Job) -> int:
        for step in range(3 * STEPS):
            _gather(rank, size, step, "x")
            if step % 7 == 3 and step > SETTLED:
                late = ddl.allreduce_async(np.ones(2), name=f"odd{step}", op=ddl.Sum)
                _exchange(rank, size, step, "x")
                np.testing.assert_array_equal(late.wait(), size)
            else:
                _exchange(rank, size, step, "x")
        return int(ddl.stats()["buckets_replayed"])

    with World(size, settings=REPLAY) as world:
        assert min(world.run(train)) > STEPS


def test_objects_that_stay_on_a_host_need_no_message() -> None:
    """This holds for objects whose sizes change, in the middle of a step, with names and without."""

    def train(rank: int, job: Job) -> tuple[int, int]:
        messages = replayed = 0
        for step in range(STEPS):
            if step == SETTLED:
                messages, replayed = ddl.stats()["control_messages"], ddl.stats()["buckets_replayed"]
            ddl.allreduce(np.ones(3), name="x")
            wanted = {"step": step, "text": "x" * (step % 5)}
            assert ddl.broadcast_object(wanted if rank == step % 2 and rank == 0 else None, name="o") == (
                wanted if step % 2 == 0 else None
            )
            assert ddl.allgather_object([rank] * (step % 3 + rank)) == [[r] * (step % 3 + r) for r in range(2)]
            ddl.barrier()
        return ddl.stats()["control_messages"] - messages, ddl.stats()["buckets_replayed"] - replayed

    with World(2, backend="shm", settings=REPLAY) as world:
        assert world.run(train) == [(0, 4 * (STEPS - SETTLED))] * 2


def test_objects_that_leave_a_host_are_announced_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digests come over the authenticated network."""
    monkeypatch.setattr(objects, "_stays_on_host", lambda job, set_id: False)

    def train(rank: int, job: Job) -> tuple[int, int]:
        before = 0
        for step in range(STEPS):
            if step == SETTLED:
                before = ddl.stats()["control_messages"]
            assert ddl.broadcast_object({"step": step} if rank == 0 else None, name="o") == {"step": step}
            ddl.allreduce(np.ones(3), name="x")
        return int(ddl.stats()["control_messages"]) - before, int(ddl.stats()["buckets_replayed"])

    with World(2, settings=REPLAY) as world:
        for messages, replayed in world.run(train):
            assert messages >= 2 * (STEPS - SETTLED)
            assert replayed > 0


@pytest.mark.parametrize("wrong", [7, -1])
def test_sizes_are_not_believed(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that delivers other sizes than were sent ends the job before memory is read or written by them."""
    honest = ThreadsTransport.allgatherv

    def tamper(self: ThreadsTransport, source: Buffer, target: Buffer, counts: Sequence[int]) -> Any:
        work = honest(self, source, target, counts)
        if source.dtype is DType.I64 and list(counts) == [2] * len(counts):  # a flag and the number of rows
            work.wait(60.0)
            # Either this rank's own number is wrong, or a number is negative.
            at = self.context.rank if wrong > 0 else 1 - self.context.rank
            view(target.address, target.nbytes).cast("q")[2 * at + 1] = wrong
        return work

    def gathers() -> None:
        for _ in range(STEPS):
            ddl.allgather(np.ones((2, 2), np.float32), name="x")

    def train(rank: int, job: Job) -> str:
        with pytest.raises((TransportError, ddl.PeerLost)) as caught:
            gathers()
        return str(caught.value)

    monkeypatch.setattr(ThreadsTransport, "allgatherv", tamper)
    with World(2, settings=REPLAY) as world:
        told = world.run(train)
    assert any("delivered wrong sizes" in text for text in told), told
