"""The shared-memory ring between threads that each map it: values, order, endings, and nothing left."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from ddl_conform.store import ThreadStore
from ddl_shm import transport as shm
from ddl_shm.kernels import frame
from ddl_shm.transport import ShmTransport

from ddlcore.contracts.transport import Context, Plan, Transport
from ddlcore.errors import TransportError
from ddlcore.types import DType, Member, ReduceOp
from tests.builtin.worlds import World, buffer, random_collectives
from tests.kernels.reference import native, numbers, reduced, same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm is for Linux")
UNUSED: Any = None


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16, 33])
def test_random_collectives(size: int) -> None:
    """Programs of all collectives, from nothing to several chunks, the same on every rank."""
    with World(ShmTransport, size) as world:
        for seed in range(4):
            world.run(random_collectives(seed, size, 10, 150_000 // size if seed % 2 else 300))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_tiny_slots(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of a KiB: hundreds of rounds a collective, so that ranks overtake each other wherever they can."""
    monkeypatch.setattr(shm, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(shm, "LEAST_CHUNK_BYTES", 1024)
    monkeypatch.setattr(shm, "RING_BYTES", 8192)
    monkeypatch.setattr(shm, "CROWDED_CHUNK_BYTES", 1024)
    monkeypatch.setattr(shm, "CROWDED_RING_BYTES", 4096)
    monkeypatch.setattr(shm, "SMALL_BYTES", 256)
    with World(ShmTransport, size) as world:
        for seed in range(3):
            world.run(random_collectives(seed, size, 10, 30_000 // size))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_loses_nothing(size: int, slow: int) -> None:
    """Ranks leave a collective before the slow one has read it, and may not overwrite what it still reads."""
    with World(ShmTransport, size) as world:

        def body(transport: Transport, rank: int) -> None:
            for k in range(60):
                if rank == slow and k % 7 == 0:
                    time.sleep(0.003)
                values = np.full(1 + 97 * k, float(k) if rank == k % size else -1.0)
                transport.broadcast(buffer(values), k % size)
                assert (values == k).all()
                total = np.full(3 + k, rank + k, np.int64)
                transport.allreduce(buffer(total), buffer(total), ReduceOp.Sum)
                assert (total == sum(range(size)) + k * size).all()

        world.run(body)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
def test_every_type_over_many_chunks(size: int, dtype: DType) -> None:
    """Sum of several chunks and a rest, with a NaN here and there, in rank order."""
    count = 3 * max(shm.CHUNK_BYTES, shm.CROWDED_CHUNK_BYTES) // dtype.itemsize + 77
    inputs = [numbers(dtype, count, seed) for seed in range(size)]
    expected = reduced(inputs, dtype, ReduceOp.Sum)
    with World(ShmTransport, size) as world:

        def body(transport: Transport, rank: int) -> None:
            x = inputs[rank].copy()
            transport.allreduce(buffer(x), buffer(x), ReduceOp.Sum)
            same(x, expected)

        world.run(body)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [DType.F16, DType.F32], ids=lambda dtype: dtype.label)
def test_buckets_do_not_change_a_bit(size: int, dtype: DType) -> None:
    """Tensors one by one, all in one bucket, or in any other company: the same bits, on every rank."""
    counts = [5, 40_000, 1, 70_001, 300]
    inputs = [[numbers(dtype, count, 10 * r + i) for i, count in enumerate(counts)] for r in range(size)]

    def run(buckets: list[list[int]]) -> list[bytes]:
        with World(ShmTransport, size) as world:

            def body(transport: Transport, rank: int) -> bytes:
                outputs = [np.empty(count, native(dtype)) for count in counts]
                for bucket in buckets:
                    plan = Plan(tuple(counts[i] for i in bucket), dtype, ReduceOp.Sum, 1.0, 1 / 3)
                    sources = [inputs[rank][i].ctypes.data for i in bucket]
                    transport.prepare(plan).start(sources, [outputs[i].ctypes.data for i in bucket])
                return b"".join(output.tobytes() for output in outputs)

            results: list[bytes] = world.run(body)
            return results

    results = run([[0], [1], [2], [3], [4]]) + run([[0, 1, 2, 3, 4]]) + run([[4, 2], [3, 0, 1]])
    assert len(set(results)) == 1


def test_a_root_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of rounds of few bytes share a slot, and a root waits for nobody: what others still read must stand."""
    monkeypatch.setattr(shm, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(shm, "LEAST_CHUNK_BYTES", 1024)
    monkeypatch.setattr(shm, "RING_BYTES", 4096)
    monkeypatch.setattr(shm, "CROWDED_CHUNK_BYTES", 1024)
    monkeypatch.setattr(shm, "CROWDED_RING_BYTES", 4096)
    with World(ShmTransport, 3) as world:

        def body(transport: Transport, rank: int) -> None:
            prepared = transport.prepare(Plan((2,), DType.I64, ReduceOp.Sum))
            for k in range(300):
                if rank == 1 and k % 60 == 0:
                    time.sleep(0.003)
                values = np.full(1 + k % 5, k if rank == 0 else -1)
                transport.broadcast(buffer(values), 0)
                assert (values == k).all()
                if k % 50 == 49:
                    total, real = np.full(2, rank + k), not (rank == 0 and k % 100 == 99)
                    assert prepared.run_atomic([total.ctypes.data], [total.ctypes.data], real) is (k % 100 != 99)
                    assert (total == (3 * k + 3 if k % 100 != 99 else rank + k)).all()

        world.run(body)


def test_rank_0_lays_out_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that see different numbers of cores share one layout."""
    cores = itertools.cycle([{0}, set(range(64)), {0, 1}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: next(cores))
    with World(ShmTransport, 3) as world:
        world.run(random_collectives(1, 3, 10, 50_000))


def test_a_plan_needs_addresses_and_an_open_transport() -> None:
    """Before bind there is nothing to reduce, after close nowhere to do it: both raise, in words."""
    with World(ShmTransport, 2) as world:
        x = np.zeros(4, np.float32)
        plan = Plan((4,), DType.F32, ReduceOp.Sum)
        prepared = world.transports[0].prepare(plan)
        with pytest.raises(TransportError, match="bind"):
            prepared.run_bound(True)
        prepared.bind([x.ctypes.data], [x.ctypes.data])
    with pytest.raises(TransportError, match="not open"):
        prepared.run_bound(True)
    with pytest.raises(TransportError, match="not open"):
        world.transports[0].prepare(plan)


@pytest.mark.parametrize("size", [2, 3])
def test_abort_at_any_moment(size: int) -> None:
    """However far the ranks are in a bucket of many chunks, all of them raise soon after an abort."""
    for attempt in range(8):
        with World(ShmTransport, size) as world:
            draw = random.Random(attempt)
            timer = threading.Timer(draw.uniform(0.0, 0.02), world.transports[attempt % size].abort)

            def body(transport: Transport, rank: int, timer: threading.Timer = timer) -> float:
                x = np.ones(300_000, np.float32)
                if rank == 0:
                    timer.start()

                def reduce_for_ever() -> None:
                    while True:
                        transport.allreduce(buffer(x), buffer(x), ReduceOp.Max)

                with pytest.raises(TransportError, match="aborted"):
                    reduce_for_ever()
                return time.monotonic()

            ends = world.run(body)
            timer.join()
            assert max(ends) - min(ends) < 20.0


def test_addresses_as_numpy_integers() -> None:
    """A table of addresses may be an int64 array or numpy's integers."""
    with World(ShmTransport, 2) as world:

        def body(transport: Transport, rank: int) -> None:
            x = np.ones(10, np.float32)
            prepared = transport.prepare(Plan((10,), DType.F32, ReduceOp.Sum))
            prepared.start(np.array([x.ctypes.data]), np.array([x.ctypes.data]))  # type: ignore[arg-type]  # on purpose
            prepared.start(tuple(np.array([x.ctypes.data])), (x.ctypes.data,))
            assert (x == 4).all()

        world.run(body)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.3])
def test_abort_ends_a_waiting_call(size: int, delay_s: float) -> None:
    """Whether it spins, yields or sleeps, a call that waits for a missing rank raises soon after an abort."""
    with World(ShmTransport, size) as world:
        aborted: list[float] = []

        def body(transport: Transport, rank: int) -> None:
            if rank == 0:
                time.sleep(delay_s)
                aborted.append(time.monotonic())
                transport.abort()
                return
            x = np.zeros(100_000)
            with pytest.raises(TransportError, match="aborted by rank 0"):
                transport.allreduce(buffer(x), buffer(x), ReduceOp.Sum)
            assert time.monotonic() - aborted[0] < 20.0

        world.run(body)
        with pytest.raises(TransportError, match="aborted here"):
            world.transports[0].barrier()


def test_abort_by_this_rank_only() -> None:
    """A rank whose own abort comes from another thread says so; an abort after close does nothing."""
    with World(ShmTransport, 2) as world:

        def body(transport: Transport, rank: int) -> None:
            if rank == 0:
                timer = threading.Timer(0.1, transport.abort)
                timer.start()
                with pytest.raises(TransportError, match="aborted here"):
                    transport.barrier()
                timer.join()

        world.run(body)
    world.abort()


def test_waiting_uses_little_of_the_core() -> None:
    """A rank that waits for half a second sleeps for most of it: the core may be the one that computes."""
    with World(ShmTransport, 2) as world:

        def body(transport: Transport, rank: int) -> float:
            if rank == 0:
                time.sleep(0.5)
            start = time.thread_time()
            transport.barrier()
            return time.thread_time() - start

        assert world.run(body)[1] < 0.1


def test_nothing_is_left_behind() -> None:
    """Descriptors, mappings and store keys of 20 communicators are gone when they are closed."""

    def facts() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:ddl" in line for line in maps)

    with World(ShmTransport, 3):
        pass
    before = facts()
    for _ in range(20):
        with World(ShmTransport, 3) as world:
            assert facts()[1] > 0
            assert not world.store._values
    assert facts() == before


def test_closed_is_closed() -> None:
    """close may come twice; a collective after it raises."""
    with World(ShmTransport, 2) as world:
        pass
    world.transports[0].close()
    with pytest.raises(TransportError, match="not open"):
        world.transports[0].barrier()


def test_ranks_on_two_hosts_are_refused() -> None:
    """Only the launcher's host index tells hosts apart; the message says what to do."""
    context = Context(0, (Member(0, 0), Member(1, 1)), ThreadStore(), UNUSED, {}, 1.0, "global")
    with pytest.raises(TransportError, match=r"2 hosts.*--backend"):
        ShmTransport().open(context)


def test_other_systems_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS open says that shm is for Linux."""
    monkeypatch.setattr(sys, "platform", "darwin")
    context = Context(0, (Member(0, 0), Member(1, 0)), ThreadStore(), UNUSED, {}, 1.0)
    with pytest.raises(TransportError, match="for Linux") as raised:
        ShmTransport().open(context)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8, 16, 33, 64, 128, 1000])
def test_memory_stays_moderate(size: int, crowded: bool) -> None:
    """Rings shrink with the number of ranks; a slot holds at least a line and an element for each."""
    chunk, ring = shm.ring_bytes(size, crowded)
    assert chunk & (chunk - 1) == 0
    assert chunk >= 8 * 2 * size
    assert ring % chunk == 0
    assert frame.LEAST_SLOTS <= ring // chunk <= frame.MOST_SLOTS
    assert size * ring <= shm.SEGMENT_BYTES or ring == frame.LEAST_SLOTS * shm.LEAST_CHUNK_BYTES
