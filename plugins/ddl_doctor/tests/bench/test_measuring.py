"""Contenders do the collective they are named for, and are timed as often as each other: in worlds of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ddl_conform.world import run_world
from ddl_doctor.bench.contenders import arrays_for, check, contenders
from ddl_doctor.bench.plan import OPERATIONS, BenchPlan
from ddl_doctor.bench.rank import measure_all, open_peers
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow
from ddl_doctor.bench.timing import Together

from ddlcore.contracts.bench import BenchPeer
from ddlcore.contracts.transport import Context
from ddlcore.errors import DdlInternalError
from ddlcore.process.job import Job
from ddlcore.types import Kind


class Liar(BenchPeer):
    """Does nothing, and has no broadcast."""

    def open(self, context: Context) -> None:
        context.store.set(f"here{context.rank}", b"yes")
        for rank in range(context.size):
            context.store.get(f"here{rank}", context.timeout_s)

    def operation(self, kind: Kind, source: Any, target: Any) -> Callable[[], object]:
        if kind is Kind.BROADCAST:
            raise NotImplementedError
        return lambda: None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_transport_and_verb_are_right(operation: str, size: int, dtype: str) -> None:
    """Checked against numpy, at sizes that do not divide evenly."""
    kind = OPERATIONS[operation]

    def body(rank: int, job: Job) -> list[str]:
        for nbytes in (1, 4, 1000):
            memory = arrays_for(kind, nbytes, dtype, job.size)
            assert 0 <= memory.nbytes - nbytes < job.size * memory.source.itemsize
            calls = contenders(job, {}, kind, memory)
            check(kind, memory, calls, rank, job.size)
            assert not memory.source.any() and not memory.target.any()
        return list(calls)

    assert run_world(size, body) == [[TRANSPORT, WHOLE]] * size


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "broadcast"])
def test_a_wrong_result_is_named(operation: str) -> None:
    """A peer that does nothing is fast, and found out."""
    kind = OPERATIONS[operation]

    def body(rank: int, job: Job) -> str:
        memory = arrays_for(kind, 64, "float32", job.size)
        liar = Liar()
        with pytest.raises(DdlInternalError, match=f"{operation} of 64 bytes: the result of liar is wrong") as caught:
            check(kind, memory, contenders(job, {"liar": liar}, kind, memory), rank, job.size)
        return str(caught.value)

    assert len(set(run_world(2, body))) == 1


def test_a_peer_that_lacks_a_collective_is_left_out() -> None:
    """The others are measured all the same."""

    def body(rank: int, job: Job) -> list[str]:
        peers = {"liar": Liar()}
        open_peers(job, peers)
        memory = arrays_for(Kind.BROADCAST, 64, "float32", job.size)
        return list(contenders(job, peers, Kind.BROADCAST, memory))

    assert run_world(2, body) == [[TRANSPORT, WHOLE]] * 2


def test_all_is_measured_and_told() -> None:
    """Every operation at every size, each contender once a round, the same messages on every rank."""
    plan = BenchPlan(("allreduce", "alltoall"), (4, 4096), "float32", 3, budget_s=0.001)

    def body(rank: int, job: Job) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        measure_all(job, plan, {}, told.append)
        return told

    first, second = run_world(2, body)
    assert first[0] == {"transport": "threads"}
    assert [message["begin"] for message in first[1::2]] == [
        [operation, nbytes] for operation in plan.operations for nbytes in plan.sizes
    ]
    rows = [MeasuredRow.from_json(message["row"]) for message in first[2::2]]
    assert [row.nbytes for row in rows] == [4, 4096, 8, 4096]
    for row in rows:
        assert set(row.times) == {TRANSPORT, WHOLE}
        assert all(len(values) == plan.rounds and min(values) > 0 for values in row.times.values())
    assert [m["row"]["times_s"] for m in first[2::2]] == [m["row"]["times_s"] for m in second[2::2]]


def test_replayed_calls_are_counted() -> None:
    """With replay, one tensor that comes again and again runs from memory before it is timed."""
    plan = BenchPlan(("allreduce",), (64,), "float32", 3, budget_s=0.001)

    def body(rank: int, job: Job) -> float:
        told: list[dict[str, Any]] = []
        measure_all(job, plan, {}, told.append)
        return MeasuredRow.from_json(told[-1]["row"]).replayed

    assert run_world(2, body, settings={"replay": True}) == [1.0, 1.0]
    assert run_world(2, body, settings={"replay": False}) == [0.0, 0.0]


def test_ranks_agree() -> None:
    """Rank 0's value everywhere, and the slowest of each."""

    def body(rank: int, job: Job) -> tuple[float, list[float]]:
        together = Together(job.sets.communicator(0).transport)
        together.barrier()
        return together.of_first(rank + 0.5), together.slowest([float(rank), -float(rank)])

    assert run_world(3, body) == [(0.5, [2.0, 0.0])] * 3


def test_arrays_are_shared_or_apart() -> None:
    """In place means one memory; what is gathered and scattered has equal parts."""
    both = arrays_for(Kind.ALLREDUCE, 10, "float32", 2)
    assert both.source is both.target and both.nbytes == 12
    gathered = arrays_for(Kind.ALLGATHER, 4, "float32", 2)
    assert (gathered.source.size, gathered.target.size) == (1, 2)
    scattered = arrays_for(Kind.REDUCESCATTER, 64, "int16", 4)
    assert (scattered.source.size, scattered.target.size) == (32, 8)
    assert not np.shares_memory(scattered.source, scattered.target)
