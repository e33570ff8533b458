"""Tests of late errors of NCCL, of dead ranks, of aborts and of closing.

No call may hang, and no communicator may be used after its end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddl_conform.group import finish
from ddl_nccl import communicator as module
from ddl_nccl import reductions, watchdog
from ddl_nccl.conformance import HostedTransport
from ddl_nccl.joining import Joining
from ddl_nccl.standin import StandIn
from ddl_nccl.transport import NcclTransport

from ddlcore.contracts.transport import Transport, Work
from ddlcore.errors import DeadlineExceeded, TransportError
from ddlcore.types import Buffer, DType, ReduceOp
from plugins.ddl_nccl.tests.worlds import hosted, open_group

COUNT = 1000


_kept: list[Any] = []  # as an executor does, keeps memory until the queue is past it, even if the call fails


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    _kept.clear()


def buffer(array: Any) -> Buffer:
    _kept.append(array)
    return Buffer(array.ctypes.data, array.size, DType.of(array.dtype.name), array.shape, owner=array)


def ones(count: int = COUNT, dtype: str = "float32") -> Any:
    return np.ones(count, dtype)


def until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    end_s = time.monotonic() + seconds
    while not true() and time.monotonic() < end_s:
        time.sleep(0.005)
    return true()


def watchdogs() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ddl-nccl-watchdog"]


CALLS: dict[str, Callable[[Transport, Buffer, Buffer], Work]] = {
    "allreduce": lambda t, small, large: t.allreduce(small, small, ReduceOp.Sum),
    "own allreduce": lambda t, small, large: t.allreduce(small, small, ReduceOp.Min),
    "allgather": lambda t, small, large: t.allgatherv(small, large, [COUNT] * 3),
    "broadcast": lambda t, small, large: t.broadcast(small, 2),
    "reducescatter": lambda t, small, large: t.reducescatterv(large, small, [COUNT] * 3, ReduceOp.Sum),
    "alltoall": lambda t, small, large: t.alltoallv(large, ones_like(large), [[COUNT] * 3] * 3),
    "barrier": lambda t, small, large: t.barrier(),
}


def ones_like(like: Buffer) -> Buffer:
    return buffer(ones(like.count))


@pytest.mark.parametrize("name", CALLS)
def test_a_dead_peer(name: str) -> None:
    """If a rank never calls a collective and the job aborts, the call ends soon on the other ranks.

    A job with NCCL must notice a lost rank within 5 s. The job itself needs up to 3 s of this time, and the abort the
    rest.
    """
    standin = StandIn()
    with open_group(3, standin) as group:
        aborted_s: list[float] = []
        both = threading.Barrier(2)

        def play(rank: int, transport: Transport) -> None:
            if rank == 2:
                return  # dead
            work = CALLS[name](transport, buffer(ones()), buffer(ones(3 * COUNT)))
            assert not work.wait(0.05)
            both.wait(40.0)
            if rank == 0:
                aborted_s.append(time.monotonic())
                for each in group.transports[:2]:
                    each.abort()
            both.wait(40.0)
            with pytest.raises(TransportError, match="aborted here"):
                finish(work)
            assert time.monotonic() - aborted_s[0] < 20.0
            with pytest.raises(TransportError, match="aborted here"):
                transport.barrier()

        group.run(play)
    assert standin.faults == [] and standin.alive() == []


def test_an_error_that_nccl_finds_later() -> None:
    """If NCCL reports an error later, the watchdog finds it. The pending call and all later calls raise it.

    The error says what to do.
    """
    standin = StandIn()
    with open_group(2, standin) as group:

        def play(rank: int, transport: Transport) -> None:
            if rank == 1:
                return
            work = transport.allreduce(buffer(ones()), buffer(ones()), ReduceOp.Sum)
            begun_s = time.monotonic()
            standin.fail(0, 6, "NET/IB : Got completion with error 12")
            with pytest.raises(TransportError, match=r"error 12.*a peer, or the network to it, is gone"):
                finish(work)
            assert time.monotonic() - begun_s < 20.0
            with pytest.raises(TransportError, match="error 12"):
                transport.broadcast(buffer(ones()), 0)
            with pytest.raises(TransportError, match=r"error 12.*\(during what is queued\)"):
                transport.check_queued()

        group.run(play)
        time.sleep(3 * watchdog.INTERVAL_S)
        assert len(standin.alive()) == 2  # the job aborts first; ended now, the queue would go on with garbage
    assert standin.faults == []


def test_the_watchdog_ends_what_nobody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the job does not abort after an error, the watchdog aborts the communicator, so that the queue continues."""
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    standin = StandIn()
    with open_group(2, standin) as group:
        first = group.transports[0]
        assert isinstance(first, HostedTransport)

        def play(rank: int, transport: Transport) -> None:
            if rank == 1:
                return
            transport.allreduce(buffer(ones()), buffer(ones()), ReduceOp.Sum)
            standin.fail(0, 6)
            assert until(lambda: len(standin.alive()) == 1)
            assert first.queue.record().wait(20.0)

        group.run(play)
    assert standin.faults == []


def test_a_bucket_that_takes_too_long() -> None:
    """If the user has set ``nccl_timeout_s``, a collective that takes longer raises an error, which names the setting.

    The time between two collectives does not count.
    """
    standin = StandIn()
    with open_group(2, standin, {"nccl_timeout_s": 2.0}) as group:

        def play(rank: int, transport: Transport) -> None:
            done = transport.allreduce(buffer(ones()), buffer(ones()), ReduceOp.Sum)
            finish(done)
            time.sleep(2.5)  # time between buckets does not count
            finish(transport.allreduce(buffer(ones()), buffer(ones()), ReduceOp.Sum))
            if rank == 0:
                with pytest.raises(TransportError, match=r"not complete after 2 s \(DDL_NCCL_TIMEOUT_S\)"):
                    finish(transport.allreduce(buffer(ones()), buffer(ones()), ReduceOp.Sum))

        group.run(play)
    assert standin.faults == []


def test_abort_returns_in_time_however_long_nccl_takes() -> None:
    """``abort`` and ``close`` return in time, even if NCCL's abort takes long. It continues in the background."""
    standin = StandIn()
    with open_group(2, standin) as group:
        standin.abort_s = 4.0
        begun_s = time.monotonic()
        group.transports[0].abort()
        assert time.monotonic() - begun_s < 3.0
        group.run(lambda rank, transport: transport.close())
        assert time.monotonic() - begun_s < 20.0
    assert until(lambda: standin.alive() == []) and standin.faults == []
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith("ddl-nccl")])


def test_one_watchdog_for_all_and_none_afterwards() -> None:
    """The process has one watchdog thread while there are communicators, and none after that."""
    for _ in range(2):
        assert until(lambda: not watchdogs())
        with open_group(3, StandIn()), open_group(2, StandIn()):
            assert len(watchdogs()) == 1
    assert until(lambda: not watchdogs())


def test_the_watchdog_outlives_a_fault() -> None:
    """If the check of one object raises an error, the watchdog continues to check the other objects."""
    looked: list[str] = []

    class One:
        def look(self) -> None:
            looked.append("one")
            raise ZeroDivisionError

    class Other:
        def look(self) -> None:
            looked.append("other")

    one, other = One(), Other()
    watchdog.watch(one)
    watchdog.watch(other)
    try:
        assert until(lambda: looked.count("other") >= 2)
    finally:
        watchdog.unwatch(one)
        watchdog.unwatch(other)
        watchdog.unwatch(other)
    assert until(lambda: not watchdogs())


def test_nothing_is_called_after_the_end() -> None:
    """If one thread closes a transport while another thread aborts it, no ended communicator is used.

    The watchdog, which checks communicators again and again, does not use one either.
    """
    standin = StandIn()
    for _ in range(10):
        with open_group(2, standin) as group:
            enders = [threading.Thread(target=transport.abort) for transport in group.transports]
            for ender in enders:
                ender.start()
            group.run(lambda rank, transport: transport.close())
            for ender in enders:
                ender.join()
    assert standin.faults == [] and standin.alive() == []


def test_abort_ends_open() -> None:
    """``abort`` soon ends ``open``, whether ``open`` waits for another rank or inside NCCL."""
    for stuck in (False, True):
        standin = StandIn()
        standin.stuck = stuck
        group = hosted(2, standin)
        timers = [threading.Timer(0.3, transport.abort) for transport in group.transports]
        for timer in timers:
            timer.start()

        def play(rank: int, transport: Transport, group: Any = group, stuck: bool = stuck) -> None:
            if rank == 1 and not stuck:
                return
            begun_s = time.monotonic()
            with pytest.raises(TransportError, match="aborted here"):
                transport.open(group.context(rank))
            assert time.monotonic() - begun_s < 20.0
            transport.close()

        group.run(play)
        group.ranks.close()
        standin.release()
        for timer in timers:
            timer.join()
        assert until(lambda standin=standin: standin.alive() == [])  # type: ignore[misc]  # mypy has no type for a lambda's default
        assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith("ddl-nccl")])


def test_gpus_that_do_not_reach_each_other() -> None:
    """If the GPUs cannot connect, ``open`` raises DeadlineExceeded, which says what to try.

    ``open`` notices this because it runs a first reduction.
    """
    standin = StandIn()
    group = hosted(2, standin)

    def play(rank: int, transport: Transport) -> None:
        assert isinstance(transport, HostedTransport)
        if rank == 1:
            transport.deaf = True
        with pytest.raises(DeadlineExceeded, match="NCCL_P2P_DISABLE=1"):
            transport.open(replace(group.context(rank), timeout_s=1.0))
        transport.close()

    group.run(play)
    group.ranks.close()
    assert standin.faults == [] and standin.alive() == []


def test_a_first_call_that_does_not_return() -> None:
    """If the first call of NCCL blocks, the watchdog aborts the communicator after the timeout of ``open``."""

    class Waiting(StandIn):
        def all_reduce(self, *arguments: Any) -> None:
            assert until(lambda: arguments[5].aborted, 60.0)
            self._raise(3, "internal error")

    standin = Waiting()
    group = hosted(2, standin)

    def play(rank: int, transport: Transport) -> None:
        begun_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="NCCL_P2P_DISABLE=1"):
            transport.open(replace(group.context(rank), timeout_s=0.5))
        assert time.monotonic() - begun_s < 20.0
        transport.close()

    group.run(play)
    group.ranks.close()
    assert standin.faults == [] and standin.alive() == []


def test_what_comes_after_close() -> None:
    """After close, a call raises "not open", and abort and close do nothing."""
    standin = StandIn()
    with open_group(2, standin) as group:
        group.run(lambda rank, transport: transport.close())
        with pytest.raises(TransportError, match="not open"):
            group.transports[0].allreduce(buffer(ones()), buffer(ones()), ReduceOp.Sum)
        group.transports[0].close()
        group.transports[0].abort()
    assert standin.faults == []


def test_a_failed_call_tells_what_and_where() -> None:
    """If NCCL raises an error, the error of ddl names the operation and says what to do.

    After that, all calls on the communicator fail.
    """

    class Failing(StandIn):
        def all_gather(self, *arguments: Any) -> None:
            self._raise(1, "Cuda failure 'invalid resource handle'")

    standin = Failing()
    with open_group(2, standin) as group:
        with pytest.raises(TransportError, match=r"nccl: allgather on communicator test failed: .*NCCL_P2P_DISABLE=1"):
            group.transports[0].allgatherv(buffer(ones()), buffer(ones(2 * COUNT)), [COUNT] * 2)
        with pytest.raises(TransportError, match="NCCL_P2P_DISABLE=1"):
            group.transports[0].barrier()
    assert standin.faults == []


def test_an_abort_in_the_midst_of_a_call() -> None:
    """If a call is aborted while it is running, its error says that this rank was aborted.

    The error that NCCL raises because of the abort is not shown.
    """

    class Ended(StandIn):
        def all_gather(self, *arguments: Any) -> None:
            group.transports[0].abort()
            self._raise(3, "internal error")

    standin = Ended()
    with open_group(2, standin) as group, pytest.raises(TransportError, match="aborted here"):
        group.transports[0].allgatherv(buffer(ones()), buffer(ones(2 * COUNT)), [COUNT] * 2)
    assert standin.faults == []


@pytest.mark.parametrize("wait_s", [5.0, 0.0])
def test_no_call_goes_on_with_what_an_abort_has_freed(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    """After an abort, a collective makes no further call of NCCL.

    ``abort`` waits up to ``CALL_S`` seconds for the call of NCCL that is in progress.
    """
    monkeypatch.setattr(module, "CALL_S", wait_s)
    monkeypatch.setattr(module, "ABORT_S", 5.0)
    monkeypatch.setattr(reductions, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(reductions, "WHOLE_BYTES", 1 << 10)
    begun = threading.Event()
    left: list[int] = []

    class Slow(StandIn):
        def group_end(self) -> None:
            begun.set()
            assert until(lambda: first._communicator._failure is not None, 15.0)  # the abort has begun
            if wait_s:
                time.sleep(0.2)  # an abort that does not wait would have ended the communicator by now
            else:
                assert until(lambda: len(self.alive()) == 1, 15.0)
            super().group_end()
            left.append(len(self.alive()))

    standin = Slow()
    with open_group(2, standin) as group:
        first: Any = group.transports[0]

        def end() -> None:
            begun.wait(20.0)
            first.abort()

        ender = threading.Thread(target=end)
        ender.start()
        array = ones(3 << 11, "float16")  # three pieces, each with a group of calls
        with pytest.raises(TransportError, match="aborted here"):
            finish(first.allreduce(buffer(array), buffer(array), ReduceOp.Sum))
        ender.join()
    assert left == [2 if wait_s else 1]  # communicators alive at the end of the only group
    assert standin.faults == []


def test_memory_outlives_a_queue_that_does_not_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """``close`` waits only a limited time for the queue. Memory of work that is still queued is not freed."""
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    standin = StandIn()
    with open_group(1, standin) as group:
        transport = group.transports[0]
        assert isinstance(transport, HostedTransport)
        with transport.queue.held():
            transport.allreduce(buffer(ones(dtype="float16")), buffer(ones(dtype="float16")), ReduceOp.Sum)
            begun_s = time.monotonic()
            NcclTransport.close(transport)
            assert time.monotonic() - begun_s < 20.0
        assert transport.queue.record().wait(20.0)  # raises if the memory was freed


def test_a_communicator_that_nobody_waits_for() -> None:
    """If the caller has given up when NCCL has created a communicator, it is passed to ``drop`` once.

    An error of ``init`` is raised by ``wait``.
    """
    dropped: list[str] = []

    def given_up() -> None:
        raise TransportError("given up")

    early = Joining(lambda: "early", dropped.append)
    assert until(early._ended.is_set)
    with pytest.raises(TransportError, match="given up"):
        early.wait(time.monotonic() + 5.0, given_up)
    assert dropped == ["early"]
    gate = threading.Event()
    late = Joining(lambda: gate.wait(20.0) and "late", dropped.append)
    assert late.wait(time.monotonic() + 0.1, lambda: None) is None
    gate.set()
    assert until(lambda: dropped == ["early", "late"])
    assert Joining(lambda: "kept", dropped.append).wait(time.monotonic() + 5.0, lambda: None) == "kept"
    with pytest.raises(ZeroDivisionError):
        Joining(lambda: 1 // 0, dropped.append).wait(time.monotonic() + 5.0, lambda: None)
    assert dropped == ["early", "late"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_takes_no_part(capfd: pytest.CaptureFixture[str]) -> None:
    """In a forked process, ``abort`` and ``close`` do not call NCCL. The parent process can still use the group."""
    standin = StandIn()

    def add(rank: int, transport: Transport) -> None:
        array = ones()
        finish(transport.allreduce(buffer(array), buffer(array), ReduceOp.Sum))
        assert (array == 2).all()

    with open_group(2, standin) as group:
        group.run(add)
        called = len(standin.called)
        child = os.fork()
        if child == 0:
            code = 3
            try:
                for transport in group.transports:
                    transport.abort()
                    transport.close()
                quiet = len(standin.called) == called and len(standin.alive()) == 2
                code = 0 if quiet and watchdog._thread is None else 4
            finally:
                os._exit(code)
        end_s = time.monotonic() + 15
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end_s:
            time.sleep(0.01)
        if done == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(done[1]) == 0, capfd.readouterr().err
        group.run(add)
    assert standin.faults == []
