"""How long a process group waits: time limits, point to point calls and monitored barriers, in worlds of threads."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from ddl_torch.distributed import described
from ddl_torch.distributed.group import DdlProcessGroup
from ddl_torch.distributed.work import DoneWork, Works

from ddlcore.errors import DeadlineExceeded
from plugins.ddl_torch.tests.distributed.groups import options, run

SHORT = timedelta(seconds=0.3)
ALIKE = 12  # equal steps, after which they are replayed


@pytest.mark.parametrize("limit", ["wait", "call", "group"])
def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_wished(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait, the call or the group limits the time. When the late rank makes its call, the operation ends."""
    monkeypatch.setattr(described, "GRACE_S", 0.0)
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        tensor = torch.ones(2)
        if rank == 1:
            assert late.wait(30)
        made = group.allreduce([tensor], options(asyncOp=True, timeout=SHORT if limit == "call" else timedelta(0)))
        if rank == 0:
            begun_s = time.monotonic()
            with pytest.raises(
                DeadlineExceeded, match=r"not ended within its timeout of 0\.3 s: some rank has not started it"
            ):
                made.wait(SHORT) if limit == "wait" else made.wait()
            assert 0.2 < time.monotonic() - begun_s < 20
            late.set()
        made.wait(timedelta(seconds=30))
        return tensor.tolist()

    assert run(2, play, timeout_s=0.3 if limit == "group" else 60) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("limit", ["call", "group"])
def test_a_blocking_call_in_replay_has_the_same_time_limits(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In replay, the calling thread runs the collective itself. After the error, the operation is still in flight.

    It ends when the late rank makes its call.
    """
    monkeypatch.setattr(described, "GRACE_S", 0.0)
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[float]:
        opts = options(asyncOp=False, timeout=SHORT if limit == "call" else timedelta(0))
        tensor, usual = torch.ones(2), options(asyncOp=False, timeout=timedelta(seconds=60))
        for _ in range(ALIKE):
            group.allreduce([torch.ones(2)], usual).wait()
        if rank == 1:
            assert late.wait(30)
            group.allreduce([tensor], usual).wait()
        else:
            begun_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"not ended within its timeout of 0\.3 s"):
                group.allreduce([tensor], opts).wait()
            assert 0.2 < time.monotonic() - begun_s < 20
            late.set()
        group.barrier(options("Barrier", timeout=timedelta(seconds=60))).wait()
        return tensor.tolist()

    assert run(2, play, timeout_s=0.3 if limit == "group" else 60, backend="shm") == [[2.0, 2.0]] * 2


def test_several_operations_in_one_work_have_a_time_limit_too() -> None:
    late = threading.Event()

    def play(group: DdlProcessGroup, rank: int) -> list[list[float]]:
        outputs, inputs = [torch.zeros(2), torch.zeros(4)], [torch.ones(1), torch.ones(2)]
        if rank == 1:
            assert late.wait(30)
        made = group.all_gather_single_coalesced(outputs, inputs, options("Allgather", asyncOp=True))
        if rank == 0:
            with pytest.raises(DeadlineExceeded):
                made.wait(SHORT)
            late.set()
        made.wait(timedelta(seconds=30))
        return [output.tolist() for output in outputs]

    assert run(2, play) == [[[1.0] * 2, [1.0] * 4]] * 2


def test_the_time_limit_is_that_of_all_operations_in_a_work_together() -> None:
    given: list[timedelta] = []

    class Slow(DoneWork):
        def wait(self, timeout: timedelta | None = None) -> bool:
            assert timeout is not None
            given.append(timeout)
            time.sleep(0.05)  # so long takes the operation
            return True

    assert Works([Slow(), Slow()], []).wait(timedelta(seconds=10))
    first, second = given
    assert second <= first - timedelta(seconds=0.04)


# --- point to point, and monitored barriers


def test_sends_and_receives() -> None:
    """By rank and tag, and from any rank, which the work then names."""

    def play(group: DdlProcessGroup, rank: int) -> None:
        if rank == 0:
            first, second, third = torch.zeros(2), torch.zeros(2), torch.zeros(1)
            later = group.recv([second], 1, 8)
            group.recv([first], 1, 7).wait()
            later.wait()
            anyone = group.recv_anysource([third], 9)
            anyone.wait()
            assert anyone._source_rank() == 2
            assert [first.tolist(), second.tolist(), third.tolist()] == [[7.0] * 2, [8.0] * 2, [9.0]]
        elif rank == 1:
            for tag in (7, 8):
                group.send([torch.full((2,), float(tag))], 0, tag).wait()
        else:
            group.send([torch.full((1,), 9.0)], 0, 9).wait()
        group.barrier(options("Barrier")).wait()

    run(3, play)


@pytest.mark.parametrize("everyone", [False, True])
def test_a_monitored_barrier_names_who_is_missing(everyone: bool) -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        group.monitored_barrier(timedelta(seconds=30))
        if rank in (1, 2):
            return
        named = "ranks 1, 2" if everyone else "rank 1"
        failed = rf"Rank 0\]: {named.capitalize()} failed to pass monitoredBarrier in 300 ms"
        with pytest.raises(
            RuntimeError, match=failed if rank == 0 else f"Rank 3 successfully .* from rank 0: {named} "
        ):
            group.monitored_barrier(SHORT, wait_all_ranks=everyone)

    run(4, play)


def test_a_monitored_barrier_without_time() -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        if rank == 0:
            with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
                group.monitored_barrier(timedelta(0))

    run(2, play)


def test_a_monitored_barrier_without_rank_0() -> None:
    def play(group: DdlProcessGroup, rank: int) -> None:
        if rank > 0:
            with pytest.raises(RuntimeError, match="rank 0 did not call it within 300 ms"):
                group.monitored_barrier(SHORT)

    run(3, play)
