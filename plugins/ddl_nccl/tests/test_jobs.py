"""Tests of whole jobs over NCCL's transport and the stand-in: negotiated, replayed, and with a dying rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from ddl_conform.pretend_tensors import PretendTensor
from ddl_conform.pretend_world import PRETEND

from ddlcore.errors import DdlInternalError, PeerLost
from ddlcore.process.job import Job
from ddlcore.types import Average, Max, Sum
from plugins.ddl_nccl.tests.worlds import NcclWorld, PretendNccl
from tests.runtime.integers import TYPES, average, values

SIZE = 3


def tensor(values: Any, dtype: str = "float32") -> PretendTensor:
    return PretendTensor.of(np.asarray(values, dtype))


def test_every_verb() -> None:
    """Every verb is right on every rank, negotiated, on streams that nobody waits for."""

    def program(rank: int, job: Job) -> None:
        n = job.size
        mine = np.arange(5.0) + rank
        total = sum(np.arange(5.0) + r for r in range(n))
        assert np.array_equal(PRETEND.allreduce_async(tensor(mine), op=Sum).wait().numpy(), total)
        assert np.allclose(PRETEND.allreduce_async(tensor(mine), op=Average).wait().numpy(), total / n)
        assert np.array_equal(PRETEND.allreduce_async(tensor(mine, "float16"), op=Sum).wait().numpy(), total)
        assert np.array_equal(
            PRETEND.allreduce_async(tensor(mine, "int16"), op=Max).wait().numpy(), mine - rank + n - 1
        )
        assert np.array_equal(
            PRETEND.allreduce_async(tensor([rank == 1, False], "bool"), op=Sum).wait().numpy(), [True, False]
        )
        gathered = PRETEND.allgather_async(tensor(np.full((rank + 1, 2), rank))).wait().numpy()
        assert np.array_equal(gathered, np.concatenate([np.full((r + 1, 2), r) for r in range(n)]))
        assert np.array_equal(PRETEND.broadcast_async(tensor(mine), 1).wait().numpy(), np.arange(5.0) + 1)
        part = PRETEND.reducescatter_async(tensor(np.ones((7, 2))), op=Sum).wait().numpy()
        assert part.shape == (7 // n + (rank < 7 % n), 2) and (part == n).all()
        received, _ = PRETEND.alltoall_async(tensor(np.full((n, 2), rank))).wait()
        assert np.array_equal(received.numpy(), np.repeat(np.arange(n), 2).reshape(n, 2))

    with NcclWorld(SIZE) as world:
        world.on_streams(program)
        standin = PretendNccl.standin
    assert standin.faults == [] and standin.alive() == []
    assert {"all_reduce", "all_gather", "broadcast", "send"} <= set(standin.called)


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_steps_are_replayed(backend: str) -> None:
    """Replayed steps give the right values, whether or not the hosts learn at once that all ranks have come."""

    def program(rank: int, job: Job) -> None:
        for step in range(12):
            gradients = [tensor(np.full(100 + i, float(rank + step + i)), kind) for i, kind in enumerate(KINDS)]
            handles = [PRETEND.allreduce_async(g, name=f"g{i}", op=Sum) for i, g in enumerate(gradients)]
            for i, handle in enumerate(handles):
                total = handle.wait().numpy()
                assert (total == sum(r + step + i for r in range(job.size))).all(), (step, i)
        stats = job.stats()
        assert stats["buckets_replayed"] > 0
        assert "over-the-stand-in" in stats["routes"][0]

    with NcclWorld(SIZE, backend=backend) as world:
        world.on_streams(program)
        standin = PretendNccl.standin
    assert standin.faults == [] and standin.alive() == []


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_integers_are_averaged_exactly(backend: str) -> None:
    """Integer averages are exact at the limits of every type, negotiated and replayed; they are staged on the host."""

    def program(rank: int, job: Job) -> None:
        for dtype in TYPES:
            array, label = values(rank, dtype), np.dtype(dtype).name
            wanted = average([values(r, dtype) for r in range(SIZE)])
            rows = [len(part) for part in np.array_split(wanted, SIZE)]
            for _ in range(5):
                mine = tensor(array, label)
                handles = [
                    PRETEND.allreduce_async(tensor(array, label), name=label, op=Average),
                    PRETEND.allreduce_async(mine, output=mine, name=f"in place {label}", op=Average),
                    PRETEND.reducescatter_async(tensor(array, label), name=f"part {label}", op=Average),
                ]
                whole, in_place, part = (handle.wait().numpy() for handle in handles)
                assert np.array_equal(whole, wanted) and np.array_equal(in_place, wanted)
                begin = sum(rows[:rank])
                assert np.array_equal(part, wanted[begin : begin + rows[rank]])
        assert job.stats()["buckets_replayed"] > 0

    with NcclWorld(SIZE, backend=backend) as world:
        world.on_streams(program)
        standin = PretendNccl.standin
    assert standin.faults == [] and standin.alive() == []


KINDS = ("float32", "float16", "float32", "float32", "float16")


def test_a_rank_that_dies() -> None:
    """When a rank dies during a bucket on the devices, the others learn soon which one, and nothing of NCCL is left."""
    began: list[float] = []
    gone = threading.Event()

    def program(rank: int, job: Job) -> None:
        PRETEND.allreduce_async(tensor(np.ones(1000)), op=Sum).wait().numpy()
        if rank == 2:
            began.append(time.monotonic())
            gone.set()
            raise MemoryError("planted")

        def go_on() -> None:
            for _ in range(1000):
                PRETEND.allreduce_async(tensor(np.ones(1000)), op=Sum).wait().numpy()

        with pytest.raises(DdlInternalError) as told:
            go_on()
        assert isinstance(told.value, PeerLost) and told.value.ranks == (2,)
        assert gone.is_set() and time.monotonic() - began[0] < 20.0

    with NcclWorld(SIZE) as world:
        with pytest.raises(MemoryError, match="planted"):
            world.on_streams(program)
        standin = PretendNccl.standin
    assert standin.faults == [] and standin.alive() == []
