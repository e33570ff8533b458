"""Compressors whose values cannot be added as they travel: shards are exchanged, added in float32 and gathered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.config.loading import load_settings
from ddlcore.errors import DdlInternalError
from ddlcore.hooks import CompressorProvider
from ddlcore.plug import Distribution, Registry, load_plugins
from ddlcore.process.job import Job
from ddlcore.runtime.handle import Handle
from ddlcore.testing import World
from tests.runtime.rounding import Rounding

BACKENDS = pytest.mark.parametrize("backend", ["threads", "shm"])
PATIENCE_S = 40.0
COUNTS = (1000, 3, 1, 0, 7)


def registry() -> Registry:
    found = load_plugins(load_settings({}))
    found.offer(CompressorProvider("rounding", "tests.runtime.rounding:Rounding"), Distribution("test", "1"))
    return found


def world(size: int, backend: str = "threads") -> World:
    return World(size, backend=backend, registry=registry())


def log_of(job: Job) -> list[tuple[str, str]]:
    compressor = job.compressor("rounding")
    assert isinstance(compressor, Rounding)
    assert compressor.staged == {}, "some encoded values never got a verdict"
    return compressor.log


def whole(rank: int, step: int, count: int) -> Any:
    return np.random.default_rng([rank, step, count]).integers(-9, 10, count).astype(np.float32)


@BACKENDS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_and_averages(size: int, backend: str) -> None:
    """Whole numbers come out exactly, in discovery and in replay, in tensors of less elements than ranks, too."""
    if size == 1 and backend == "shm":
        pytest.skip("shm serves two ranks and more")
    steps = 12

    def play(rank: int, job: Job) -> tuple[list[list[Any]], int]:
        results = []
        for step in range(steps):
            handles = [
                ddl.allreduce_async(whole(rank, step, count), name=f"t{count}", op=ddl.Sum, compression="rounding")
                for count in COUNTS
            ]
            results.append([handle.wait() for handle in handles])
        half = ddl.allreduce(np.full(5, 2.0, np.float32), name="average", compression="rounding", prescale_factor=3.0)
        assert half.tolist() == [6.0] * 5
        left_alone = ddl.allreduce(np.arange(3), name="whole", op=ddl.Max, compression="rounding")
        assert left_alone.tolist() == [0, 1, 2]
        return results, ddl.stats()["buckets_replayed"]

    with world(size, backend) as ranks:
        outcomes = ranks.run(play)
        logs = [log_of(job) for job in ranks.jobs]
    for results, replayed in outcomes:
        assert replayed > 0 or size == 1
        for step, arrays in enumerate(results):
            for count, array in zip(COUNTS, arrays):
                assert array.tolist() == sum(whole(rank, step, count) for rank in range(size)).tolist()
    for log in logs:
        counts = Counter(what for what, _ in log)
        assert counts["encode"] == counts["valid"] + counts["void"]


def test_what_rounding_takes_comes_next_time() -> None:
    """0.25 from each of two ranks: after four steps their sums have added up to 2."""

    def play(rank: int, job: Job) -> float:
        each = [
            ddl.allreduce(np.full(8, 0.25, np.float32), name="small", op=ddl.Sum, compression="rounding")
            for _ in range(8)
        ]
        return float(sum(each)[0])

    with world(2) as ranks:
        for total in ranks.run(play):
            assert abs(total - 4.0) <= 1.0


def test_a_void_bucket_commits_false_and_comes_again() -> None:
    """A rank that meets something else drains without data: the others' bucket is void, and no state has changed."""
    rounds = 4
    replaying = [False, False]
    meet = threading.Barrier(2)
    launched = [threading.Event() for _ in range(rounds)]

    def small() -> Handle:
        return ddl.allreduce_async(np.full(6, 0.25, np.float32), name="t", op=ddl.Sum, compression="rounding")

    def settle(rank: int, job: Job) -> list[float]:
        """Steps until both ranks are in replay."""
        values: list[float] = []
        until_s = time.monotonic() + PATIENCE_S
        while not values or not all(replaying):
            assert time.monotonic() < until_s, f"rank {rank} is not in replay after {len(values)} steps"
            meet.wait(PATIENCE_S)  # both have looked
            values.append(float(small().wait()[0]))
            replaying[rank] = job.lookout.replay_status() is not None
            meet.wait(PATIENCE_S)
        return values

    def await_launch(job: Job) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while (replay_status := job.lookout.replay_status()) is None or not replay_status.launched:
            assert time.monotonic() < until_s, f"the bucket was not launched; the rank stands at {replay_status}"
            time.sleep(0.001)

    def play(rank: int, job: Job) -> int:
        values = []
        for i in range(rounds):
            values += settle(rank, job)
            if rank == 1:  # rank 0 has launched its bucket of the schedule by the time this one leaves
                assert launched[i].wait(2 * PATIENCE_S)
                ddl.allreduce(np.ones(1, np.float32), name=f"other{i}", op=ddl.Sum)
            handle = small()
            if rank == 0:
                await_launch(job)
                launched[i].set()
                ddl.allreduce(np.ones(1, np.float32), name=f"other{i}", op=ddl.Sum)
            values.append(float(handle.wait()[0]))
        assert abs(sum(values) - 0.5 * len(values)) <= 1.0, f"{len(values)} sums add up to {sum(values)}"
        return ddl.stats()["buckets_void"]

    with world(2) as ranks:
        void = ranks.run(play)
        logs = [log_of(job) for job in ranks.jobs]
    assert void[0] >= rounds
    assert any(what == "void" and name for log in logs for what, name in log), "no verdict was told"


def test_a_rank_that_has_joined_brings_nothing() -> None:
    """The sums are those of the others, and its shards are still added by it."""

    def play(rank: int, job: Job) -> list[float]:
        sums = []
        for step in range(3 if rank == 1 else 6):
            sums.append(
                float(ddl.allreduce(np.full(9, 2.0, np.float32), name="t", op=ddl.Sum, compression="rounding")[8])
            )
            assert len(sums) == step + 1
        ddl.join()
        return sums

    with world(3) as ranks:
        first, second, third = ranks.run(play)
    assert second == [6.0] * 3
    assert first == third == [6.0] * 3 + [4.0] * 3


def test_names_are_a_process_sets_own() -> None:
    """Tensors of one name in two sets, cut into other pieces in each: what rounding takes of one never comes to the other."""

    def play(rank: int, job: Job) -> tuple[float, float]:
        pair = ddl.add_process_set([0, 1])
        world_sum = pair_sum = 0.0
        for _ in range(12):
            quarter, nothing = np.full(6, 0.25, np.float32), np.zeros(6, np.float32)
            handles = [ddl.allreduce_async(quarter, name="t", op=ddl.Sum, compression="rounding")]
            if pair.included():
                handles.append(
                    ddl.allreduce_async(nothing, name="t", op=ddl.Sum, compression="rounding", process_set=pair)
                )
            sums = [float(handle.wait()[0]) for handle in handles]
            world_sum += sums[0]
            pair_sum += sums[-1] if pair.included() else 0.0
        return world_sum, pair_sum

    with world(3) as ranks:
        for world_sum, pair_sum in ranks.run(play):
            assert abs(world_sum - 9.0) <= 1.0
            assert pair_sum == 0.0


@pytest.mark.parametrize("replay", [True, False])
def test_what_has_no_name_leaves_nothing(replay: bool) -> None:
    """Each call is a tensor that never comes again: state for it would grow without end."""

    def play(rank: int, job: Job) -> None:
        for _ in range(20):
            assert ddl.allreduce(np.full(6, 2.0, np.float32), op=ddl.Sum, compression="rounding")[0] == 4

    with World(2, backend="threads", registry=registry(), settings={"replay": replay}) as ranks:
        ranks.run(play)
        for job in ranks.jobs:
            compressor = job.compressor("rounding")
            assert isinstance(compressor, Rounding)
            assert compressor.rests == {} and compressor.staged == {}


def test_other_operations_are_refused_and_the_job_goes_on() -> None:
    """A maximum on every rank alike; reducescatter at the call."""

    def play(rank: int, job: Job) -> float:
        with pytest.raises(DdlInternalError, match="'rounding' is for sums and averages, not for max"):
            ddl.allreduce(np.ones(3, np.float32), name="most", op=ddl.Max, compression="rounding")
        with pytest.raises(ValueError, match="not summable, which reducescatter needs"):
            ddl.reducescatter(np.ones(4, np.float32), name="part", op=ddl.Sum, compression="rounding")
        result: Any = ddl.allreduce(np.ones(3, np.float32), name="sum", op=ddl.Sum, compression="rounding")
        return float(result[0])

    with world(2) as ranks:
        assert ranks.run(play) == [2.0, 2.0]
