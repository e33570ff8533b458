"""The values of ``stats()`` are right: each key is compared with a program whose counts are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore import Stats
from ddlcore.process.job import Job
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.testing import World
from ddlcore.types import Kind

pytestmark = pytest.mark.timeout(360)

T = TypeVar("T")


def together(size: int, program: Callable[[int, Job], T], backend: str = "threads", **settings: object) -> list[T]:
    """Run ``program`` on ``size`` ranks, and return the results by rank.

    No rank leaves before all have ended, since a rank that leaves makes the others count messages.
    """
    with World(size, backend=backend, settings=settings) as world:
        return world.run(program)


def test_negotiated_buckets_are_counted() -> None:
    """Without replay each step counts one negotiated bucket and two or three control messages, and nothing is void."""

    def program(rank: int, job: Job) -> tuple[Stats, Stats]:
        ddl.allreduce(np.ones(4), name="a")
        before = ddl.stats()
        for _ in range(10):
            ddl.allreduce(np.ones(4), name="a")
        return before, ddl.stats()

    for before, after in together(2, program, replay=False):
        assert after["buckets_negotiated"] - before["buckets_negotiated"] == 10
        # An answer goes to all who take part, and to who has asked: to the first at once, to the second with the bucket.
        assert 20 <= after["control_messages"] - before["control_messages"] <= 30
        assert after["buckets_replayed"] == after["buckets_void"] == after["divergences"] == 0
        assert after["commit_messages"] == after["stall_messages"] == 0


def test_replayed_buckets_are_counted() -> None:
    """In steady replay each step counts one replayed bucket, no negotiated one, and no control message."""

    def program(rank: int, job: Job) -> tuple[Stats, Stats]:
        for _ in range(10):
            ddl.allreduce(np.ones(4), name="a")
        before = ddl.stats()
        for _ in range(10):
            ddl.allreduce(np.ones(4), name="a")
        return before, ddl.stats()

    for before, after in together(2, program):
        assert after["buckets_replayed"] - before["buckets_replayed"] == 10
        assert after["buckets_negotiated"] == before["buckets_negotiated"]
        assert after["control_messages"] == before["control_messages"]


def test_void_buckets_and_divergences_are_counted() -> None:
    """If a rank launches a bucket that the other cannot fill, it counts a void bucket, and the other a divergence."""
    launched = threading.Event()

    def program(rank: int, job: Job) -> Stats:
        for _ in range(20):
            handles = [ddl.allreduce_async(np.ones(4), name=name) for name in "ab"]
            for handle in handles:
                handle.wait()
        if rank == 0:
            handles = [ddl.allreduce_async(np.ones(4), op=ddl.Average, name=name) for name in "ab"]
            deadline_s = time.monotonic() + 40.0
            while (at := job.lookout.replay_status()) is None or not at.launched:
                assert time.monotonic() < deadline_s, f"the engine's thread has not launched the bucket: {at}"
                time.sleep(0.001)  # it tells nobody, so a test has no event to wait for
            launched.set()
        else:
            assert launched.wait(80)
            handles = [ddl.allreduce_async(np.ones(4), name="a")]
            assert handles[0].wait()[0] == 1, "b does not come: this rank leaves, and a is negotiated"
            handles.append(ddl.allreduce_async(np.ones(4), name="b"))
        for handle in handles:
            assert handle.wait()[0] == 1
        return ddl.stats()

    first, second = together(2, program)
    assert second["divergences"] == 1
    assert first["divergences"] == 0
    assert first["buckets_void"] == 1
    assert second["buckets_void"] == 0, "it has not launched the bucket"


@pytest.mark.parametrize("replay", [True, False])
def test_bytes_are_those_of_the_users_tensors(replay: bool) -> None:
    """Bytes are counted by operation, and are those of the user's own tensors.

    Fusion, compression and the number of ranks do not matter. For allgather and alltoall, the rows of this rank
    count.
    """
    steps = 12

    def program(rank: int, job: Job) -> Stats:
        for _ in range(steps):
            handles = [
                ddl.allreduce_async(np.ones(100, np.float32), name="a", compression="fp16"),
                ddl.allreduce_async(np.ones(50, np.float64), name="b"),
                ddl.broadcast_async(np.ones(7, np.int32), 0, name="c"),
                ddl.reducescatter_async(np.ones((6, 2), np.float32), name="d"),
                ddl.allgather_async(np.ones((1 + rank, 3), np.float32), name="e"),
                ddl.alltoall_async(np.ones(3, np.int64), [1, 2], name="f"),
            ]
            for handle in handles:
                handle.wait()
        ddl.barrier()
        return ddl.stats()

    for rank, stats in enumerate(together(2, program, replay=replay)):
        assert stats["bytes"] == {
            "allreduce": steps * (100 * 4 + 50 * 8),
            "broadcast": steps * 7 * 4,
            "reducescatter": steps * 12 * 4,
            "allgather": steps * (1 + rank) * 3 * 4,
            "alltoall": steps * 3 * 8,
        }
        assert (stats["buckets_replayed"] > 0) is replay


def test_seconds_are_where_they_were_spent() -> None:
    """If rank 1 sleeps, it counts the time as idle, and rank 0 counts it as transport time and as the user's wait."""
    pause_s = 1.0  # far more than the rest takes

    def program(rank: int, job: Job) -> tuple[Stats, Stats]:
        for _ in range(10):
            ddl.allreduce(np.ones(4), name="a")
        before = ddl.stats()
        if rank == 1:
            time.sleep(pause_s)  # what is measured
        ddl.allreduce(np.ones(4), name="a")
        return before, ddl.stats()

    def spent(pair: tuple[Stats, Stats]) -> dict[str, float]:
        before, after = pair
        return {stage: seconds - before["seconds"][stage] for stage, seconds in after["seconds"].items()}

    punctual, late = map(spent, together(2, program))
    assert set(punctual) == {"commit", "device", "idle", "pack", "transport", "unpack", "user"}
    assert punctual["transport"] >= 0.9 * pause_s
    assert punctual["user"] >= 0.9 * pause_s
    assert late["idle"] >= 0.9 * pause_s
    assert late["user"] < 0.9 * pause_s


@pytest.mark.parametrize("replay", [True, False])
def test_copies_are_timed(replay: bool) -> None:
    """A compressor counts time for packing and unpacking.

    Without one, a transport that reads and writes the tensors in place counts none.
    """

    def program(compression: str) -> dict[str, float]:
        def play(rank: int, job: Job) -> dict[str, float]:
            for _ in range(8):
                ddl.allreduce(np.ones(1 << 18, np.float32), name="a", compression=compression)
            return ddl.stats()["seconds"]

        return together(2, play, backend="shm", replay=replay)[0]

    packed, plain = program("bf16"), program("none")
    assert packed["pack"] > 0
    assert packed["unpack"] > 0
    assert plain["pack"] == plain["unpack"] == 0
    assert plain["transport"] > 0


def test_routes_name_the_transport_of_each_set() -> None:
    """The routes name the transport and the reason for each process set that this rank is a member of."""

    def program(rank: int, job: Job) -> dict[int, str]:
        ddl.add_process_set([0, 2])
        ddl.barrier()
        return ddl.stats()["routes"]

    routes = together(3, program)
    assert routes[0] == {0: "threads (asked for)", 1: "threads (asked for)"}
    assert routes[1] == {0: "threads (asked for)"}


def test_every_key_is_documented() -> None:
    """``Stats`` declares exactly the keys that ``stats()`` returns, and its docstring describes each of them."""
    (stats,) = together(1, lambda rank, job: ddl.stats(), backend="auto")
    assert set(stats) == set(Stats.__annotations__)
    assert Stats.__doc__ is not None
    assert [key for key in stats if f"``{key}``" not in Stats.__doc__] == []
    assert stats["bytes"] == {}


def test_counting_is_cheap() -> None:
    """Counting and timing a bucket costs a look at the clock and some additions: less than 2 microseconds."""
    meter = Meter()
    best_ns = []
    for _ in range(20):
        begun_ns = since_ns = now_ns()
        for _ in range(1000):
            meter.replayed += 1
            meter.nbytes[Kind.ALLREDUCE] += 4
            ended_ns = now_ns()
            meter.busy_ns += ended_ns - since_ns
            since_ns = ended_ns
        best_ns.append((now_ns() - begun_ns) / 1000)
    print(f"counting one bucket: {min(best_ns):.0f} ns")
    assert min(best_ns) < 2000
