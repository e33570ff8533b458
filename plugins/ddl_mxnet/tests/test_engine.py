"""Collectives in MXNet's engine and MXNet's own operators wait for each other."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import ddl_mxnet as ddl
import mxnet as mx
import numpy as np
import pytest
from ddl_mxnet import autograd, engine, ops
from ddl_mxnet.autograd import OPERATIONS
from ddl_mxnet.engine import Pushed
from ddl_mxnet.reducer import Fence, Slot
from ddl_mxnet.traffic import EngineTraffic

from ddlcore.api import current_job
from ddlcore.testing import run_world


def held(*arrays: Any) -> tuple[Pushed, threading.Event]:
    """Push an operation that writes ``arrays`` and does not end before its method ``end`` is called.

    Return the operation, which has begun, and the event that is set when it begins.
    """
    begun = threading.Event()
    operation = Pushed((), arrays, begun.set)
    operation.push()
    assert begun.wait(40.0)
    return operation, begun


def stand(*arrays: Any) -> None:
    """Wait until these arrays are computed.

    ``mx.nd.waitall`` would also wait for arrays of the other ranks, because all ranks share one engine in these tests.
    """
    for array in arrays:
        array.wait_to_read()


def test_results_are_waited_for_like_any_operators() -> None:
    """Operators of MXNet and collectives can follow each other without a wait between them."""

    def play(rank: int, job: Any) -> Any:
        array = mx.nd.ones((1000,)) * (rank + 1)
        for _ in range(3):
            array = array * 2
            ddl.allreduce_(array, name="a", op=ddl.Sum)
            array = array + 1
        return array.asnumpy()

    for result in run_world(2, play):
        value = np.full(1000, 1.0)
        other = np.full(1000, 2.0)
        for _ in range(3):
            value = other = (value + other) * 2 + 1
        np.testing.assert_array_equal(result, value)


def test_the_call_does_not_wait_for_what_is_computed() -> None:
    """The call returns before the array's values are ready, and sends them when they are."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.full((4,), rank + 1.0)
        array.wait_to_read()
        writing, _ = held(array)
        outcome = ddl.allreduce(array, name="new", op=ddl.Sum)  # if it waited, this test would hang
        ddl.allreduce_(array, name="place", op=ddl.Sum)
        handle = ddl.allreduce_async(array, name="handle", op=ddl.Sum)
        assert not ddl.poll(handle)
        assert job.companion(EngineTraffic)._running == 0
        writing.end()
        assert outcome.asnumpy().tolist() == [3.0] * 4
        assert array.asnumpy().tolist() == [3.0] * 4
        assert handle.wait().asnumpy().tolist() == [6.0] * 4

    run_world(2, play)


def test_views_of_one_array_in_one_call() -> None:
    """Views of one array share an engine variable; a call with several of them does not deadlock."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.full((4, 3), rank + 1.0)
        ddl.grouped_allreduce_([array[:2], array[2:]], name="halves", op=ddl.Sum)
        assert array.asnumpy().tolist() == [[3.0] * 3] * 4
        one, other = ddl.grouped_allreduce([array, array[:1]], name="read", op=ddl.Sum)
        assert (one.asnumpy().max(), other.asnumpy().min()) == (6.0, 6.0)
        Fence([Slot("up", array[:2], False), Slot("down", array[2:], False)]).push()
        array.wait_to_read()
        with pytest.raises(ValueError, match="stands twice"):
            ddl.grouped_allreduce_([array, array], name="twice")

    run_world(2, play)


def test_pending_reads_see_the_old_values() -> None:
    """An operator that was called before a reduction in place reads the old values."""

    def play(rank: int, job: Any) -> None:
        array, other = mx.nd.full((5,), rank + 1.0), mx.nd.zeros((5,))
        stand(array, other)
        reading, _ = held(other)
        old = array + other  # waits for ``other``
        ddl.allreduce_(array, name="a", op=ddl.Sum)
        time.sleep(0.05)  # a reduction that does not wait would have ended by now
        reading.end()
        assert old.asnumpy().tolist() == [rank + 1.0] * 5
        assert array.asnumpy().tolist() == [3.0] * 5

    run_world(2, play)


def test_each_gradient_goes_off_when_it_stands() -> None:
    """An array that is already computed is reduced while another array is still being computed."""

    def play(rank: int, job: Any) -> None:
        early, late = mx.nd.ones((3,)), mx.nd.ones((3,))
        stand(early, late)
        writing, _ = held(late)
        late_one = OPERATIONS.at(1)
        late_one.allreduce_async(late, output=late, name="late", op=ddl.Sum)
        ddl.allreduce_(early, name="early", op=ddl.Sum)
        assert early.asnumpy().tolist() == [2.0] * 3
        writing.end()
        assert late.asnumpy().tolist() == [2.0] * 3

    run_world(2, play)


def test_calls_of_one_name_keep_their_order() -> None:
    """The second call with a name waits for the first one, even if its own array is ready earlier.

    So the first calls of all ranks belong to one operation, and so do the second calls.
    """

    def play(rank: int, job: Any) -> list[Any]:
        first, second = mx.nd.full((2,), 1.0 + rank), mx.nd.full((2,), 10.0 + rank)
        stand(first, second)
        writing = held(first)[0] if rank == 0 else None
        one, two = (ddl.allreduce(array, name="same", op=ddl.Sum) for array in (first, second))
        if writing is not None:
            time.sleep(0.05)  # both calls of the other rank are ready by now
            writing.end()
        return [one.asnumpy().tolist(), two.asnumpy().tolist()]

    assert run_world(2, play) == [[[3.0] * 2, [21.0] * 2]] * 2


def test_named_calls_are_replayed() -> None:
    """In replay, a step of named calls sends no control message.

    A thread that gets no CPU core for 50 ms amid a step seems to wait, and then the ranks leave replay and return to
    it. So not every ten steps need be without a message, but some are.
    """

    def play(rank: int, job: Any) -> list[tuple[int, int, int]]:
        arrays = [mx.nd.ones((n,)) for n in range(1, 9)]
        tens = []
        for step in range(90):
            if step >= 20 and step % 10 == 0:
                tens.append(ddl.stats())
            for i, array in enumerate(arrays):
                array[:] = rank + step
                ddl.allreduce_(array, name=f"g{i}", priority=-i)
            total = sum(array.sum() for array in arrays).asscalar()
            assert total == pytest.approx(36 * (step + 0.5))
        tens.append(ddl.stats())
        ddl.barrier()  # a rank that leaves replay sends messages
        return [
            (
                after["control_messages"] - before["control_messages"],
                after["divergences"] - before["divergences"],
                after["buckets_replayed"] - before["buckets_replayed"],
            )
            for before, after in pairwise(tens)
        ]

    for counts in run_world(2, play):
        messages, divergences, replayed = min(counts)
        assert (messages, divergences) == (0, 0), counts
        assert replayed >= 10, counts


def test_who_waits_in_mxnet_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a bucket cannot be filled, the replay soon ends, even if the user's thread waits inside MXNet.

    In this test, the control thread would end the replay only after 60 s.
    """
    monkeypatch.setattr("ddlcore.runtime.alarm.IDLE_S", 60.0)  # so the control thread would act only after 60 s

    def play(rank: int, job: Any) -> float:
        arrays = [mx.nd.ones((4,)) for _ in range(4)]
        for _ in range(20):
            for i, array in enumerate(arrays):
                ddl.allreduce_(array, name=f"g{i}", op=ddl.Sum)
            stand(*arrays)
        replayed = ddl.stats()["buckets_replayed"]
        assert replayed > 0
        begun_s = time.monotonic()
        ddl.allreduce_(arrays[0], name="g0", op=ddl.Sum)
        arrays[0].wait_to_read()
        return time.monotonic() - begun_s

    assert max(run_world(2, play)) < 20.0


def test_errors_are_raised_by_who_waits() -> None:
    """A thread that waits for the array, or for an array computed from it, gets the error of the collective.

    After that, the job still works.
    """

    def play(rank: int, job: Any) -> None:
        array = mx.nd.ones((2 + rank,))
        other = ddl.allreduce(array, name="wrong", op=ddl.Sum) * 2
        with pytest.raises(ddl.DdlInternalError, match="wrong"):
            other.asnumpy()
        _, unlike = ddl.grouped_allreduce_([mx.nd.ones((2,)), mx.nd.ones((1 + rank,))], name="group")
        with pytest.raises(ddl.DdlInternalError, match="group"):
            unlike.wait_to_read()
        good = ddl.allreduce_(mx.nd.ones((2,)), name="right", op=ddl.Sum)
        assert good.asnumpy().tolist() == [2.0, 2.0]

    run_world(2, play)


def test_what_mxnet_cannot_compute_is_not_waited_for() -> None:
    """If MXNet cannot compute an array, the handle of its collective raises an error.

    After that, the name of the collective can be used again.
    """

    def play(rank: int, job: Any) -> None:
        array = mx.nd.ones((3,))
        failing, _ = held(array)
        handle = ddl.allreduce_async(array, name="x", op=ddl.Sum)
        failing.end(RuntimeError("no memory, say"))
        with pytest.raises(mx.base.MXNetError, match="could not compute"):
            handle.wait()
        with pytest.raises(RuntimeError, match="no memory, say"):
            array.wait_to_read()
        job.companion(EngineTraffic).settle()
        assert ddl.allreduce(mx.nd.ones((1,)), name="x", op=ddl.Sum).asscalar() == 2.0

    run_world(2, play)


def test_nothing_is_taken_after_shutdown() -> None:
    """After shutdown calls raise NotInitialized; shutdown itself lets earlier calls finish."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.full((3,), rank + 1.0)
        slow = mx.nd.ones((1,))
        writing, _ = held(slow, array)
        ddl.allreduce_(array, name="r", op=ddl.Sum)
        threading.Timer(0.1, writing.end).start()
        job.shutdown(settle=True)
        assert array.asnumpy().tolist() == [3.0] * 3
        with pytest.raises(ValueError, match="shut down"):
            OPERATIONS.allreduce_async(array, job=job)

    run_world(2, play)


def test_layouts_of_onednn_are_put_in_order() -> None:
    """Outputs of convolutions, and weights that oneDNN has reordered for inference, are sent with the right values."""

    def play(rank: int, job: Any) -> None:
        net = mx.gluon.nn.Conv2D(32, 3, in_channels=16)
        net.initialize(mx.init.Constant(rank + 1.0))
        data = mx.nd.ones((2, 16, 8, 8))
        made = net(data)  # in inference
        np.testing.assert_array_equal(
            ddl.allreduce(made, op=ddl.Sum).asnumpy(), np.full(made.shape, 3 * 16 * 9.0, np.float32)
        )
        net(data)
        weight = ddl.broadcast_(net.weight.data(), 1)
        assert weight.asnumpy().min() == weight.asnumpy().max() == 2.0
        assert net(data).asnumpy().max() == 2 * 16 * 9.0
        made = net(data)
        ddl.allreduce_(made, op=ddl.Sum)
        assert made.asnumpy().tolist() == np.full(made.shape, 4 * 16 * 9.0).tolist()
        dense = mx.gluon.nn.Dense(64, in_units=64, use_bias=False)
        dense.initialize(mx.init.Constant(rank + 1.0))
        dense(mx.nd.ones((8, 64)))  # reorders its weights
        assert ddl.allreduce(dense.weight.data(), op=ddl.Sum).asnumpy().tolist() == np.full((64, 64), 3.0).tolist()

    run_world(2, play)


def test_what_is_being_computed_is_not_looked_at() -> None:
    """ddl does not ask MXNet for the memory of an array that MXNet is still computing.

    MXNet allocates the memory of an array when it computes the array or when a program asks for the memory. If two
    threads did this at the same time, both would allocate memory.
    """

    def memory(array: Any) -> int | None:
        chunk = ctypes.c_void_p.from_address(array.handle.value or 0).value
        return ctypes.c_void_p.from_address(chunk or 0).value

    def play(rank: int, job: Any) -> None:
        slow = mx.nd.full((8, 4, 2, 2), rank + 1.0)
        writing, _ = held(slow)
        made = slow * 2
        memories = [memory(slow), memory(made)]
        ddl.allreduce_(made, op=ddl.Sum)
        other = ddl.allreduce(made, op=ddl.Sum)
        memories.append(memory(made))
        writing.end()
        assert memories[0] and memories[1:] == [None, None], "what is still to be computed has none"
        assert made.asnumpy().tolist() == np.full(made.shape, 6.0).tolist()
        assert other.asnumpy().tolist() == np.full(made.shape, 12.0).tolist()

    run_world(2, play)


def test_the_jobs_thread_ends_with_it() -> None:
    """Each job has one thread that reports when a user's thread may be waiting. The thread ends with the job."""

    def play(rank: int, job: Any) -> str:
        ddl.allreduce(mx.nd.ones((1,))).wait_to_read()
        thread = current_job().companion(EngineTraffic)._thread
        assert thread is not None
        assert thread.is_alive()
        return thread.name

    names = run_world(2, play)
    assert names == ["ddl-mxnet-0", "ddl-mxnet-1"]
    assert not [thread for thread in threading.enumerate() if thread.name in names]


def test_the_end_does_not_wait_for_what_the_peers_lack(caplog: Any) -> None:
    """Shutdown does not wait for a call that the other rank never makes."""

    def play(rank: int, job: Any) -> None:
        lost = ddl.allreduce(mx.nd.ones((3,)), name=f"of {rank} alone")
        ddl.shutdown()
        with pytest.raises(ddl.DdlInternalError):
            lost.wait_to_read()

    run_world(2, play, settings={"stall_warning_s": 0.3})
    assert "calls that its peers lack" in caplog.text


def test_a_call_behind_one_of_its_name_is_handed_over_later() -> None:
    """``join`` and ``remove_process_set`` also wait for calls that are queued behind a call of the same name."""

    def play(rank: int, job: Any) -> None:
        traffic = job.companion(EngineTraffic)
        first, second = traffic.queue("x"), traffic.queue("x")
        thread = threading.Thread(target=traffic.handed_over)
        thread.start()
        traffic.enter(first, lambda: traffic.submitted(first))
        traffic.enter(second, lambda: traffic.submitted(second))
        assert traffic._unsubmitted == 1
        assert thread.is_alive()
        traffic.quit(first)
        thread.join(40.0)
        assert not thread.is_alive()
        traffic.quit(second)

    run_world(1, play)


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ddl treat MXNet's engine as the naive one, whose operations end within the call that pushes them."""

    def push(operation: Pushed, priority: int = 0) -> None:
        raise AssertionError("the naive engine refuses an operation that ends later")

    for module in (autograd, engine, ops):
        monkeypatch.setattr(module, "is_naive", lambda: True)
    monkeypatch.setattr(Pushed, "push", push)


NAIVE_CALLS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "allreduce": (lambda x: ddl.allreduce(x, op=ddl.Sum), [5.0, 7.0]),
    "allreduce_": (lambda x: ddl.allreduce_(x, op=ddl.Sum), [5.0, 7.0]),
    "grouped_allreduce": (lambda x: ddl.grouped_allreduce([x, x[1:]], op=ddl.Sum)[1], [7.0]),
    "grouped_allreduce_": (lambda x: ddl.grouped_allreduce_([x], op=ddl.Sum)[0], [5.0, 7.0]),
    "compressed": (lambda x: ddl.allreduce(x, op=ddl.Sum, compression=ddl.Compression.fp16), [5.0, 7.0]),
    "broadcast": (lambda x: ddl.broadcast(x, 1), [3.0, 4.0]),
    "broadcast_": (lambda x: ddl.broadcast_(x, 1), [3.0, 4.0]),
    "allgather": (ddl.allgather, [2.0, 3.0, 3.0, 4.0]),
    "grouped_allgather": (lambda x: ddl.grouped_allgather([x])[0], [2.0, 3.0, 3.0, 4.0]),
    "alltoall": (ddl.alltoall, [2.0, 3.0]),
    "reducescatter": (lambda x: ddl.reducescatter(x, op=ddl.Sum), [5.0]),
    "grouped_reducescatter": (lambda x: ddl.grouped_reducescatter([x], op=ddl.Sum)[0], [5.0]),
    "handle": (lambda x: ddl.synchronize(ddl.allreduce_async(x, op=ddl.Sum)), [5.0, 7.0]),
}


@pytest.mark.parametrize("name", NAIVE_CALLS)
def test_calls_return_with_their_result_under_the_naive_engine(naive: None, name: str) -> None:
    """A call pushes nothing to the engine. It waits for the other rank, and its result is there when it returns."""
    call, expected = NAIVE_CALLS[name]
    other_begins = threading.Event()

    def play(rank: int, job: Any) -> list[float]:
        array = mx.nd.array([2.0 + rank, 3.0 + rank])
        array.wait_to_read()
        if rank == 1:
            time.sleep(0.02)  # a call that does not wait would return on rank 0 meanwhile
            other_begins.set()
        result = call(array)
        assert other_begins.is_set()
        return result.asnumpy().tolist()  # type: ignore[no-any-return]

    assert run_world(2, play)[0] == expected


def test_an_error_is_raised_by_the_call_under_the_naive_engine(naive: None) -> None:
    """Later waits of MXNet would not raise the error, because the naive engine does not keep it."""

    def play(rank: int, job: Any) -> None:
        array = mx.nd.ones((1 + rank,))
        array.wait_to_read()
        with pytest.raises(ddl.DdlInternalError, match="wrong"):
            ddl.allreduce_(array, name="wrong")

    run_world(2, play)


def test_the_exit_of_the_interpreter_waits_for_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback into an interpreter that has ended would abort the process, as after an error of the script."""
    told: list[str] = []
    monkeypatch.setattr(engine, "_LIB", SimpleNamespace(MXNotifyShutdown=lambda: told.append("the end")))
    engine._end()
    assert told == []  # nothing was pushed
    array = mx.nd.ones((3,))
    first, _ = held(array)
    began, may_end = threading.Event(), threading.Event()

    def begin() -> None:
        began.set()
        may_end.wait(40.0)
        second.end()

    second = Pushed((), (array,), begin)
    second.push()
    ending = threading.Thread(target=engine._end)
    ending.start()
    try:
        ending.join(0.02)
        assert ending.is_alive()  # the engine has not called the second operation back
        first.end()
        assert began.wait(40.0)
        ending.join(0.02)
        assert ending.is_alive()  # the callback runs
    finally:
        first.end()
        may_end.set()
        ending.join(40.0)
    assert not ending.is_alive()
    assert told == ["the end"]
