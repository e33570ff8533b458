"""Tests of two ranks with tensors on CUDA devices, staged on the host: the whole way of a bucket over CudaDevice."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import Operations
from ddlcore.process.job import Job
from ddlcore.testing import World
from plugins.ddl_nccl.tests.cuda.fake import FakeDriver, settled
from plugins.ddl_nccl.tests.cuda.world import FakeAdapter, FakeCuda, Tensor, leave, registry

OPERATIONS = Operations(FakeAdapter())
COUNTS = (3, 40, 1, 17)
STEPS = 14  # enough for replay to begin


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # numba's simulator polls
    FakeCuda.shared = made = FakeDriver()
    yield made
    made.stop()
    sys.setswitchinterval(interval)


@pytest.mark.timeout(360)
def test_a_training_loop_by_way_of_the_host(driver: FakeDriver) -> None:
    """In a training loop, each step's averages are right, negotiated and replayed, and kernels pack the tensors."""

    def play(rank: int, job: Job) -> int:
        try:
            for step in range(STEPS):
                near = [np.full(n, float(10 * step + i + 2 * rank), np.float32) for i, n in enumerate(COUNTS)]
                handle = OPERATIONS.grouped_allreduce_async([Tensor.of(x) for x in near], name="g", op=ddl.Average)
                for i, result in enumerate(handle.wait()):
                    np.testing.assert_array_equal(result.numpy(), np.full(COUNTS[i], 10 * step + i + 1, np.float32))
            return job.stats()["buckets_replayed"]
        finally:
            leave()

    with World(2, backend="shm", settings={"device_dense": "cpu"}, registry=registry()) as world:
        assert all(replayed > 0 for replayed in world.run(play, deadline_s=100.0))
    assert driver.asked["launch"] > 0
    assert settled(lambda: not (driver.streams or driver.blocks or driver.pinned_blocks)), "the job has kept something"


@pytest.mark.timeout(360)
def test_operations_by_way_of_the_host(driver: FakeDriver) -> None:
    def play(rank: int, job: Job) -> None:
        try:
            mine = Tensor.of(np.arange(6, dtype=np.int64).reshape(2, 3) + 100 * rank)
            both = np.concatenate([np.arange(6).reshape(2, 3) + 100 * each for each in range(2)])
            np.testing.assert_array_equal(OPERATIONS.allgather_async(mine, name="a").wait().numpy(), both)
            np.testing.assert_array_equal(
                OPERATIONS.broadcast_async(mine, root_rank=1, name="b").wait().numpy(), both[2:]
            )
            greatest = OPERATIONS.allreduce_async(mine, name="c", op=ddl.Max).wait()
            np.testing.assert_array_equal(greatest.numpy(), both[2:])
        finally:
            leave()

    with World(2, backend="shm", settings={"device_dense": "cpu"}, registry=registry()) as world:
        world.run(play, deadline_s=100.0)
