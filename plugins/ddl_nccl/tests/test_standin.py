"""Tests of the stand-in: it records what NCCL does not allow, and has NCCL's defects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ddl_conform.pretend import KIND, PretendQueue, PretendRuntime
from ddl_nccl.standin import StandIn, StandInError
from ddl_nccl.standin_moves import AVG, MAX, SUM
from ddl_nccl.standin_world import Comm

from ddlcore.types import Device

F16, F32, U8 = 6, 7, 1


class Ranks:
    """Two ranks, each with a communicator, a queue and some memory."""

    def __init__(self) -> None:
        self.standin = StandIn()
        self.comms: list[Comm] = [None, None]  # type: ignore[list-item]  # filled in below
        self.queues: list[PretendQueue] = []
        self.runtimes: list[PretendRuntime] = []
        unique_id = self.standin.unique_id()
        for rank in range(2):
            runtime = PretendRuntime()
            runtime.open(Device(KIND, rank))
            self.runtimes.append(runtime)
            self.queues.append(runtime.queue())
            self.standin.know(self.queues[rank])

        def init(rank: int) -> None:
            self.comms[rank] = self.standin.init(2, unique_id, rank, rank, "test")

        threads = [threading.Thread(target=init, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        self.memory = [np.arange(64, dtype=np.float32) + rank for rank in range(2)]

    def at(self, rank: int) -> int:
        return int(self.memory[rank].ctypes.data)

    def both(self, call: Callable[[int, Comm, int], Any]) -> None:
        """Call ``call(rank, comm, stream)`` for each rank, and wait until everything has run or was aborted."""
        for rank in range(2):
            call(rank, self.comms[rank], self.queues[rank].handle)
        events = [queue.record() for queue in self.queues]
        end_s = time.monotonic() + 0.5
        for rank, event in enumerate(events):
            if not event.wait(max(0.0, end_s - time.monotonic())):
                self.standin.abort(self.comms[rank])
        assert all(event.wait(20.0) for event in events)

    def close(self) -> None:
        for rank in range(2):
            if not self.comms[rank].ended:
                self.standin.abort(self.comms[rank])
            self.queues[rank].close(5.0)
            self.runtimes[rank].close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


WRONG: dict[str, tuple[Callable[[Ranks, int, Comm, int], Any], str]] = {
    "counts": (lambda w, r, c, s: w.standin.all_reduce(w.at(r), w.at(r), 4 + r, F32, SUM, c, s), "the ranks disagree"),
    "types": (lambda w, r, c, s: w.standin.all_reduce(w.at(r), w.at(r), 4, U8 if r else F32, SUM, c, s), "disagree"),
    "ops": (lambda w, r, c, s: w.standin.all_reduce(w.at(r), w.at(r), 4, F32, MAX if r else SUM, c, s), "disagree"),
    "roots": (lambda w, r, c, s: w.standin.broadcast(w.at(r), w.at(r), 4, F32, r, c, s), "disagree"),
    "kinds": (
        lambda w, r, c, s: (
            w.standin.broadcast(w.at(r), w.at(r), 4, F32, 0, c, s)
            if r
            else w.standin.all_reduce(w.at(r), w.at(r), 4, F32, SUM, c, s)
        ),
        "disagree",
    ),
    "messages": (
        lambda w, r, c, s: (
            w.standin.send(w.at(r), 4, F32, 1 - r, c, s) if r else w.standin.recv(w.at(r), 5, F32, 1 - r, c, s)
        ),
        "receives recv of 5",
    ),
    "nothing": (lambda w, r, c, s: w.standin.all_reduce(w.at(r), w.at(r), 0, F32, SUM, c, s), "was asked for"),
    "a type": (lambda w, r, c, s: w.standin.all_reduce(w.at(r), w.at(r), 4, 3, SUM, c, s), "was asked for"),
    "an op": (lambda w, r, c, s: w.standin.all_reduce(w.at(r), w.at(r), 4, F32, AVG + 1, c, s), "was asked for"),
    "a root": (lambda w, r, c, s: w.standin.broadcast(w.at(r), w.at(r), 4, F32, 2, c, s), "has no rank 2"),
}


@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("a type", "an op", "a root", "nothing")])
def test_ranks_that_do_not_agree(ranks: Ranks, name: str) -> None:
    """If ranks do not agree, NCCL would hang or overwrite memory; the stand-in records a fault."""
    call, said = WRONG[name]
    ranks.both(lambda rank, comm, stream: call(ranks, rank, comm, stream))
    assert any(said in fault for fault in ranks.standin.faults), ranks.standin.faults


@pytest.mark.parametrize("name", ["a type", "an op", "a root", "nothing"])
def test_what_no_rank_may_ask_for(ranks: Ranks, name: str) -> None:
    """Invalid arguments are recorded, whatever the other ranks do."""
    call, said = WRONG[name]
    ranks.standin.group_start()  # called, but not executed
    call(ranks, 0, ranks.comms[0], ranks.queues[0].handle)
    assert any(said in fault for fault in ranks.standin.faults)
    ranks.standin._group.calls.clear()
    ranks.standin.group_end()


def test_groups_begin_before_they_end(ranks: Ranks) -> None:
    """A group must begin before it ends, on each thread; nested groups are executed with the outermost."""
    standin = ranks.standin
    with pytest.raises(StandInError):
        standin.group_end()
    assert standin.faults == ["a group ends that was never begun"]

    def swap(rank: int, comm: Comm, stream: int) -> None:
        standin.group_start()
        standin.group_start()
        standin.recv(ranks.at(rank) + 128, 4, F32, 1 - rank, comm, stream)
        standin.group_end()
        assert comm.queued == 0
        standin.send(ranks.at(rank), 4, F32, 1 - rank, comm, stream)
        standin.group_end()
        assert comm.queued == 1

    ranks.both(swap)
    assert (ranks.memory[0][32:36] == [1, 2, 3, 4]).all() and (ranks.memory[1][32:36] == [0, 1, 2, 3]).all()


def test_a_send_without_a_group_waits_for_its_receive(ranks: Ranks) -> None:
    """Two ranks that both send before they receive are stuck, as with NCCL; an abort lets the queues continue."""
    standin = ranks.standin

    def swap(rank: int, comm: Comm, stream: int) -> None:
        standin.send(ranks.at(rank), 4, F32, 1 - rank, comm, stream)
        standin.recv(ranks.at(rank) + 128, 4, F32, 1 - rank, comm, stream)

    ranks.both(swap)
    assert [comm.ended for comm in ranks.comms] == ["abort", "abort"]


@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_memory_of_who_was_aborted_is_not_touched(ranks: Ranks, kind: str) -> None:
    """The memory of an aborted rank is not touched, because it may be freed; the other rank waits for its own abort."""
    comms, streams = ranks.comms, [queue.handle for queue in ranks.queues]
    before = ranks.memory[1].copy()
    if kind == "recv":
        ranks.standin.send(ranks.at(0), 4, F32, 1, comms[0], streams[0])
    else:
        ranks.standin.all_reduce(ranks.at(0), ranks.at(0), 4, F32, SUM, comms[0], streams[0])
    ranks.standin.abort(comms[0])
    assert ranks.queues[0].record().wait(20.0)
    if kind == "recv":
        ranks.standin.recv(ranks.at(1), 4, F32, 0, comms[1], streams[1])
    else:
        ranks.standin.all_reduce(ranks.at(1), ranks.at(1), 4, F32, SUM, comms[1], streams[1])
    event = ranks.queues[1].record()
    assert not event.wait(0.2)
    ranks.standin.abort(comms[1])
    assert event.wait(20.0)
    assert (ranks.memory[1] == before).all() and ranks.standin.faults == []


def test_use_after_the_end(ranks: Ranks) -> None:
    """Calls, queries and ends after a communicator's end are recorded, and an end while calls are queued, too."""
    standin = ranks.standin
    comm, stream = ranks.comms[0], ranks.queues[0].handle
    standin.all_reduce(ranks.at(0), ranks.at(0), 4, F32, SUM, comm, stream)
    standin.destroy(comm)
    assert "destroyed with 1 calls queued" in standin.faults[-1]
    with pytest.raises(StandInError):
        standin.all_reduce(ranks.at(0), ranks.at(0), 4, F32, SUM, comm, stream)
    assert "was called after its end" in standin.faults[-1]
    standin.state(comm)
    assert "asked for its state after its end" in standin.faults[-1]
    standin.abort(comm)
    assert "abort after its end" in standin.faults[-1]
    assert standin.alive() == [ranks.comms[1]]


def test_streams(ranks: Ranks) -> None:
    """An unknown stream is recorded, and a second stream of one communicator, too."""
    standin = ranks.standin
    other = ranks.runtimes[0].queue()
    standin.know(other)
    standin.group_start()
    standin.all_reduce(ranks.at(0), ranks.at(0), 4, F32, SUM, ranks.comms[0], 12345678)
    assert "stream 12345678, which nobody knows" in standin.faults[-1]
    standin._group.calls.clear()
    for queue in (ranks.queues[0], other):
        standin.all_reduce(ranks.at(0), ranks.at(0), 4, F32, SUM, ranks.comms[0], queue.handle)
    standin.group_end()
    assert "was called on several streams" in standin.faults[-1]
    standin.abort(ranks.comms[0])
    other.close(5.0)


def test_where_nccl_falls_short(ranks: Ranks) -> None:
    """The stand-in loses NaNs as NCCL does, so that code which relies on NCCL for these fails its tests."""
    for rank, memory in enumerate(ranks.memory):
        memory[:2] = [float("nan"), 1.0] if rank else [5.0, float("nan")]
    ranks.both(lambda r, c, s: ranks.standin.all_reduce(ranks.at(r), ranks.at(r), 2, F32, MAX, c, s))
    assert (ranks.memory[0][:2] == [5.0, 1.0]).all()
    assert ranks.standin.faults == []


def test_a_wrong_meeting() -> None:
    """An unknown unique id and a rank that comes twice are refused."""
    standin = StandIn()
    with pytest.raises(StandInError):
        standin.init(1, b"x" * 128, 0, 0, "")
    unique_id = standin.unique_id()
    standin.destroy(standin.init(1, unique_id, 0, 0, ""))
    with pytest.raises(StandInError):
        standin.init(1, unique_id, 0, 0, "")
    assert "does not fit" in standin.last_error(None)
