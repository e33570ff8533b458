"""The verbs in worlds of threads: values, names, process sets, join, objects, and what bad calls are told."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import objects, operations
from ddlcore.process.job import Job
from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=["threads", "shm"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_verb_gives_its_value(backend: str) -> None:
    """Three ranks, each verb once, against what it is defined to be."""

    def program(rank: int, job: Job) -> None:
        x = np.arange(6, dtype=np.float32) + rank
        assert ddl.size() == 3
        assert ddl.rank() == rank
        np.testing.assert_allclose(ddl.allreduce(x), np.arange(6) + 1)
        np.testing.assert_array_equal(ddl.allreduce(x, op=ddl.Sum), 3 * np.arange(6) + 3)
        np.testing.assert_array_equal(ddl.allreduce(x, op=ddl.Max), np.arange(6) + 2)
        np.testing.assert_array_equal(ddl.allreduce(x, op=ddl.Min), np.arange(6))
        np.testing.assert_array_equal(ddl.allreduce(np.full(2, rank + 1), op=ddl.Product), [6, 6])
        y = x.copy()
        assert ddl.allreduce_(y, op=ddl.Sum, prescale_factor=0.5, postscale_factor=4.0) is y
        np.testing.assert_allclose(y, 6 * np.arange(6) + 6)
        rows = np.full((rank + 1, 2), rank, np.int16)
        np.testing.assert_array_equal(ddl.allgather(rows)[:, 0], [0, 1, 1, 2, 2, 2])
        np.testing.assert_array_equal(ddl.broadcast(x, 2), np.arange(6) + 2)
        z = x.copy()
        assert ddl.broadcast_(z, 1) is z
        np.testing.assert_array_equal(z, np.arange(6) + 1)
        sent = np.repeat(np.arange(3), [1, rank, 2]) * 10 + rank
        output, received = ddl.alltoall(sent, splits=[1, rank, 2])
        assert list(received) == [[1, 1, 1], [0, 1, 2], [2, 2, 2]][rank]
        np.testing.assert_array_equal(output, np.repeat(np.arange(3), received) + 10 * rank)
        part = ddl.reducescatter(np.arange(7, dtype=np.float64), op=ddl.Sum)
        np.testing.assert_array_equal(part, 3 * np.array_split(np.arange(7), 3)[rank])
        ddl.barrier()

    run_world(3, program, backend=backend)


def test_grouped_verbs_give_lists(backend: str) -> None:
    """Grouped forms, with and without names, in place and not."""

    def program(rank: int, job: Job) -> None:
        tensors = [np.full(n, rank, np.float32) for n in (1, 5, 0, 1000)]
        results = ddl.grouped_allreduce(tensors, op=ddl.Sum, name="g")
        assert [list(set(r)) for r in results] == [[1.0], [1.0], [], [1.0]]
        assert ddl.grouped_allreduce_(tensors, op=ddl.Sum)[3] is tensors[3]
        assert tensors[3][0] == 1
        a, b = ddl.grouped_allgather([np.array([rank]), np.array([[rank, rank]])])
        assert a.tolist() == [0, 1]
        assert b.shape == (2, 2)
        c, d = ddl.grouped_reducescatter([np.ones(3), np.ones((2, 2))], op=ddl.Sum)
        assert c.shape == ((2,), (1,))[rank]
        assert d.tolist() == [[2, 2]]

    run_world(2, program, backend=backend)


def test_handles_are_asynchronous_and_orders_may_differ(backend: str) -> None:
    """Ranks submit fifty named tensors in opposite orders, poll, and wait in any order."""

    def program(rank: int, job: Job) -> None:
        order = range(50) if rank == 0 else reversed(range(50))
        handles = {i: ddl.allreduce_async(np.full(10, i + rank, np.int64), name=f"t{i}", op=ddl.Sum) for i in order}
        for i in sorted(handles, key=lambda i: i % 7):
            assert ddl.synchronize(handles[i])[0] == 2 * i + 1
            assert ddl.poll(handles[i])
            assert ddl.synchronize(handles[i])[0] == 2 * i + 1, "a handle gives its result again"

    run_world(2, program, backend=backend)


def test_an_operation_is_not_done_before_the_others_take_part() -> None:
    """poll is False while a rank is missing, and wait does not return."""
    gate = threading.Event()

    def program(rank: int, job: Job) -> None:
        if rank == 1:
            assert gate.wait(40)
        handle = ddl.allreduce_async(np.ones(1), name="x")
        if rank == 0:
            time.sleep(0.05)
            assert not ddl.poll(handle)
            gate.set()
        assert ddl.synchronize(handle)[0] == 1.0

    run_world(2, program)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda rank: ddl.allreduce(np.ones(3 + rank), name="x"), "shape"),
        (lambda rank: ddl.allreduce(np.ones(3, [np.float32, np.float64][rank]), name="x"), "dtype"),
        (lambda rank: ddl.allreduce(np.ones(3), name="x", op=[ddl.Sum, ddl.Min][rank]), "op"),
        (lambda rank: ddl.broadcast(np.ones(3), rank, name="x"), "root"),
        (lambda rank: ddl.allreduce(np.ones(3), name="x", prescale_factor=1.0 + rank), "prescale"),
        (lambda rank: ddl.allgather(np.ones((3, 2 + rank)), name="x"), "shape"),
        (lambda rank: ddl.allreduce(np.ones(3)) if rank else ddl.broadcast(np.ones(3), 0), "kind"),
        (lambda rank: ddl.grouped_allreduce([np.ones(3)] * (2 + rank)), "group"),
    ],
    ids=["shape", "dtype", "op", "root", "scale", "gather", "kind", "group"],
)
def test_disagreement_raises_on_every_rank_and_the_job_goes_on(mine: Any, words: str) -> None:
    """MismatchError with a table of who asked what; the next operation works."""

    def program(rank: int, job: Job) -> None:
        with pytest.raises(ddl.MismatchError) as caught:
            mine(rank)
        assert words in str(caught.value)
        assert isinstance(caught.value, ddl.HorovodInternalError)
        assert ddl.allreduce(np.ones(1), op=ddl.Sum)[0] == 2

    run_world(2, program)


def test_bad_calls_are_value_errors_at_the_call() -> None:
    """Each says what to do, nothing is sent, and the ranks stay in step."""

    def program(rank: int, job: Job) -> None:
        base = np.ones((4, 4))
        cases: list[tuple[Any, str]] = [
            (lambda: ddl.allreduce(base[:, :2]), "contiguous"),
            (lambda: ddl.allreduce(np.ones(2, "longdouble")), "not supported"),
            (lambda: ddl.allreduce(np.ones(2, np.uint32)), "uint32 can be gathered"),
            (lambda: ddl.allreduce(np.ones(2, np.complex64), op=ddl.Max), "complex64; complex numbers have Sum"),
            (lambda: ddl.allreduce(np.ones(2, np.uint64), weight=2.0), "not uint64"),
            (lambda: ddl.allreduce(base, op=ddl.Adasum), "not available yet"),
            (lambda: ddl.allreduce(np.ones(2, bool)), "average of bool"),
            (lambda: ddl.allreduce(base, op=99), "op=99"),
            (lambda: ddl.allreduce(base, compression="zip"), "'zip'"),
            (lambda: ddl.broadcast(base, 5), "root_rank=5"),
            (lambda: ddl.alltoall(base, splits=[1, 2]), "do not add up"),
            (lambda: ddl.alltoall(base, splits=[4]), "one for each"),
            (lambda: ddl.alltoall(base, splits=[5, -1]), "do not add up"),
            (lambda: ddl.alltoall(np.ones(3)), "not divisible"),
            (lambda: ddl.allgather(np.array(1.0)), "at least one dimension"),
            (lambda: ddl.reducescatter(np.array(1.0)), "at least one dimension"),
            (lambda: ddl.grouped_allreduce([]), "empty"),
            (lambda: ddl.allreduce(base, process_set=ddl.ProcessSet([0, 1])), "not registered"),
            (lambda: ddl.add_process_set([0, 7]), "invalid rank"),
            (lambda: ddl.add_process_set([]), "empty"),
            (lambda: ddl.add_process_set([0, 0]), "duplicate"),
        ]
        for call, words in cases:
            with pytest.raises(ValueError, match=words):
                call()
        assert ddl.allreduce(np.ones(1), op=ddl.Sum)[0] == 2

    run_world(2, program)


def test_a_name_in_flight_is_refused() -> None:
    """The second use of a name before the first is done raises; afterwards it may be used again."""
    gate = threading.Event()

    def program(rank: int, job: Job) -> None:
        if rank == 1:
            assert gate.wait(40)
            ddl.allreduce(np.ones(1), name="x")
        else:
            handle = ddl.allreduce_async(np.ones(1), name="x")
            with pytest.raises(ValueError, match="already in flight"):
                ddl.allreduce_async(np.ones(1), name="x")
            gate.set()
            handle.wait()
        ddl.allreduce(np.ones(1), name="x")

    run_world(2, program)


def test_process_sets_static_dynamic_and_overlapping(backend: str) -> None:
    """Sets communicate by themselves, overlap, come and go; members only."""

    def program(rank: int, job: Job) -> None:
        low = ddl.add_process_set([1, 0])
        high = ddl.add_process_set(ddl.ProcessSet(range(1, 4)))
        alone = ddl.add_process_set([2])
        assert (low.ranks, low.process_set_id, low.size()) == ([0, 1], 1, 2)
        assert low.included() is (rank in (0, 1))
        with pytest.raises(ValueError, match="exists already"):
            ddl.add_process_set([0, 1])
        for _ in range(5):
            if rank in (0, 1):
                assert low.rank() == rank
                assert ddl.allreduce(np.full(3, rank), op=ddl.Sum, process_set=low)[0] == 1
            if rank >= 1:
                assert high.rank() == rank - 1
                assert ddl.allreduce(np.full(3, rank), op=ddl.Sum, process_set=high)[0] == 6
                assert ddl.broadcast(np.array([rank]), 3, process_set=high)[0] == 3
            if rank == 2:
                assert ddl.allgather(np.array([7]), process_set=alone).tolist() == [7]
        if rank == 3:
            with pytest.raises(ValueError, match="rank 3 is not a member"):
                ddl.allreduce(np.ones(1), process_set=low)
            with pytest.raises(ValueError, match="rank 3 is not a member"):
                low.rank()
        assert ddl.process_sets() == {0: [0, 1, 2, 3], 1: [0, 1], 2: [1, 2, 3], 3: [2]}
        assert ddl.remove_process_set(low) is True
        assert low.process_set_id is None
        assert ddl.remove_process_set(low) is False
        assert ddl.remove_process_set(ddl.global_process_set) is False
        with pytest.raises(ValueError, match="not registered"):
            ddl.allreduce(np.ones(1), process_set=low)
        assert ddl.allreduce(np.ones(1), op=ddl.Sum)[0] == 4

    run_world(4, program, backend=backend)


def test_ranks_that_add_different_sets_are_told() -> None:
    """The table names the members each rank gave; adding works afterwards."""

    def program(rank: int, job: Job) -> None:
        with pytest.raises(ddl.MismatchError, match="ranks"):
            ddl.add_process_set([1] if rank == 0 else [0])
        assert ddl.add_process_set([0]).process_set_id is not None

    run_world(2, program)


@pytest.mark.parametrize("setting", ["contributors", "size"])
def test_averages_after_join(setting: str, backend: str) -> None:
    """They divide by the ranks that contribute, within process sets too, or by all, as the setting says."""

    def program(rank: int, job: Job) -> None:
        pair = ddl.add_process_set([0, 3])
        trio = ddl.add_process_set([1, 2, 3])
        early = ddl.allreduce_async(np.full(2, float(rank or 6)), name="early")
        if rank > 1:  # ranks 0 and 1 have joined, but all four had asked for "early"
            names = ["a", "b"]
            handles = [ddl.allreduce_async(np.full(3, 10.0 * rank), name=name) for name in names]
            wanted = 25.0 if setting == "contributors" else 12.5
            assert [handle.wait().tolist() for handle in handles] == [[wanted] * 3] * 2
            assert ddl.reducescatter(np.full(8, 2.0), name="s")[0] == (2.0 if setting == "contributors" else 1.0)
            found = ddl.allreduce(np.full(3, 3.0 * rank), name="t", process_set=trio)[0]
            assert found == (7.5 if setting == "contributors" else 5.0)
            assert ddl.allreduce(np.full(3, 8.0), name="sum", op=ddl.Sum)[0] == 16.0
            one = ddl.allreduce_async(np.full(3, 8.0), name="p", process_set=pair) if rank == 3 else None
            if one is not None:
                assert one.wait()[0] == (8.0 if setting == "contributors" else 4.0)
        assert early.wait().tolist() == [3.0, 3.0]
        ddl.join()
        assert ddl.allreduce(np.full(3, float(rank)), name="after")[0] == 1.5, "all contribute again"

    run_world(4, program, backend=backend, settings={"join_average": setting})


def test_tensors_of_other_contributors_share_no_bucket(backend: str) -> None:
    """All ranks asked for one tensor before a rank joined, and only some for the other; both become ready at once."""

    def program(rank: int, job: Job) -> None:
        all_of_them = ddl.allreduce_async(np.full(2, 3.0 * rank), name="x")
        some = ddl.allreduce_async(np.full(2, 4.0 * rank), name="y") if rank else None
        assert ddl.join() in range(3)
        assert all_of_them.wait().tolist() == [3.0, 3.0]
        if some is not None:
            assert some.wait().tolist() == [6.0, 6.0]

    run_world(3, program, backend=backend)


def test_join_with_uneven_work(backend: str) -> None:
    """A rank with less data joins; the others go on with all kinds; anonymous calls pair up again afterwards."""

    def program(rank: int, job: Job) -> None:
        for step in range(2 + 2 * rank):
            value = ddl.allreduce(np.ones(4, np.float32), op=ddl.Sum, name="g", prescale_factor=2.0)
            active = sum(step < 2 + 2 * r for r in range(3))
            assert value[0] == 2.0 * active
            low = ddl.allreduce(np.full(1, 5 + rank), op=ddl.Min, name="m")
            assert low[0] == 5 + min(r for r in range(3) if step < 2 + 2 * r)
            gathered = ddl.allgather(np.full(1, rank), name="a")
            assert gathered.tolist() == [r for r in range(3) if step < 2 + 2 * r]
        if rank == 2:
            ddl.allreduce(np.ones(1))  # the others have joined: an anonymous call more than they made
        assert ddl.join() == 2
        assert ddl.allreduce(np.ones(1), op=ddl.Sum)[0] == 3

    run_world(3, program, backend=backend)


def test_objects_travel_and_foreign_bytes_are_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any picklable object; bytes that differ from what their owner announced raise, unread."""

    def program(rank: int, job: Job) -> None:
        thing = {"rank": rank, "f": (lambda x: x + rank), "big": "x" * 100_000}
        got = ddl.broadcast_object(thing, root_rank=1)
        assert got["rank"] == 1
        assert got["f"](1) == 2
        assert [o["rank"] for o in ddl.allgather_object(thing, name="all")] == [0, 1]
        assert ddl.broadcast_object(None if rank else 5) == 5

    run_world(2, program)

    def forged(rank: int, job: Job) -> None:
        with pytest.raises(ddl.ObjectDigestError, match="rank 1"):
            ddl.broadcast_object("truth", root_rank=1)

    from ddl_conform.threads import ThreadsTransport

    monkeypatch.setattr(objects, "_stays_on_host", lambda job, set_id: False)
    honest = ThreadsTransport.allgatherv

    def tamper(self: ThreadsTransport, source: Any, target: Any, counts: Any) -> Any:
        work = honest(self, source, target, counts)
        from ddlcore.contracts.transport import view

        if self.context.rank == 0:
            view(target.address, 1)[0] ^= 1
        return work

    monkeypatch.setattr(ThreadsTransport, "allgatherv", tamper)

    def receiver(rank: int, job: Job) -> None:
        if rank == 0:
            forged(rank, job)
        else:
            ddl.broadcast_object("truth", root_rank=1)

    run_world(2, receiver)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_sends_16_bits(compression: str, backend: str) -> None:
    """The sum of float32 values that 16 bits hold exactly is exact; ints are left alone."""

    def program(rank: int, job: Job) -> None:
        x = np.arange(80, dtype=np.float32) * (1 + rank)
        np.testing.assert_array_equal(
            ddl.allreduce(x, op=ddl.Sum, compression=compression, postscale_factor=0.5), 1.5 * np.arange(80)
        )
        n = np.arange(1000, dtype=np.int32)
        np.testing.assert_array_equal(ddl.allreduce(n, op=ddl.Sum, compression=compression), 2 * n)

    run_world(2, program, backend=backend)


def test_shutdown_ends_handles_and_peers_are_told() -> None:
    """Unfinished handles of the one who leaves raise Closed; who needs it raises PeerLost; init is asked for."""
    waits = threading.Event()

    def program(rank: int, job: Job) -> None:
        if rank == 0:
            handle = ddl.allreduce_async(np.ones(1), name="never")
            assert waits.wait(40)
            ddl.shutdown()
            with pytest.raises(ddl.Closed):
                handle.wait()
            with pytest.raises(ddl.NotInitialized, match="init"):
                ddl.allreduce(np.ones(1))
        else:
            handle = ddl.allreduce_async(np.ones(1), name="other")
            waits.set()
            with pytest.raises(ddl.PeerLost, match=r"rank 0 lost.*shutdown") as caught:
                handle.wait()
            assert caught.value.rank == 0
            with pytest.raises(ddl.PeerLost):
                ddl.allreduce(np.ones(1))

    run_world(2, program)


def test_several_threads_of_a_rank_may_submit(backend: str) -> None:
    """Four threads a rank, each with its own names, at once."""

    def program(rank: int, job: Job) -> None:
        wrong: list[str] = []

        def work(thread: int) -> None:
            with ddl_use(job):
                for i in range(20):
                    value = ddl.allreduce(np.full(7, rank + thread), op=ddl.Sum, name=f"{thread}.{i}")
                    if value[0] != 1 + 2 * thread:
                        wrong.append(f"{thread}.{i}: {value[0]}")

        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not wrong

    from ddlcore.api import use_job as ddl_use

    run_world(2, program, backend=backend)


def test_a_world_of_one_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five lines at a prompt: size 1 and rank 0, and every verb gives back what it was given."""
    monkeypatch.delenv("DDL_JOB_FILE", raising=False)
    with pytest.raises(ValueError, match="not been initialized"):
        ddl.size()
    ddl.init()
    try:
        ddl.init()
        assert (ddl.size(), ddl.rank(), ddl.local_size(), ddl.local_rank(), ddl.cross_size()) == (1, 0, 1, 0, 1)
        assert ddl.is_homogeneous()
        x = np.arange(4.0)
        np.testing.assert_array_equal(ddl.allreduce(x), x)
        np.testing.assert_array_equal(ddl.allreduce(x, postscale_factor=2.0), 2 * x)
        np.testing.assert_array_equal(ddl.allgather(x), x)
        np.testing.assert_array_equal(ddl.reducescatter(x), x)
        assert ddl.broadcast_object({"a": 1}) == {"a": 1}
        assert ddl.join() == 0
        ddl.barrier()
    finally:
        ddl.shutdown()
        ddl.shutdown()
    assert not ddl.is_initialized()


def test_calls_in_place_by_ever_new_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call that waits leaves behind for the next of its name is bounded; old names go on working."""
    monkeypatch.setattr(operations, "PERSISTENT_LIMIT", 8)

    def play(rank: int, job: Job) -> int:
        x = np.zeros(3, np.float32)
        for step in range(100):
            x[:] = rank + step
            ddl.allreduce_(x, name=f"step{step % 30}", op=ddl.Sum)
            assert (x == 2 * step + 1).all()
        return max(len(job.persistent_requests), len(job.tensor_queue.unfinished.requests))

    assert max(run_world(2, play)) <= 8


def test_a_factor_is_read_at_every_call() -> None:
    """What describes a call that comes again is its factors' values, not the objects that hold them."""

    def play(rank: int, job: Job) -> list[float]:
        factor = np.array(0.5)
        sums = []
        for _ in range(6):
            x = np.ones(2)
            ddl.allreduce_(x, name="x", op=ddl.Sum, prescale_factor=factor)
            sums.append(float(x[0]))
            factor *= 2
        return sums

    assert run_world(2, play) == [[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]] * 2
