"""``should_stop`` in worlds of threads: true on all ranks at the same call, without a message before somebody asks."""

from __future__ import annotations

import random
import signal
import threading
import time

import numpy as np
import pytest
from ddl_conform.world import World

import ddlcore
from ddlcore.api import Job, stopping, use_job
from ddlcore.errors import Closed, DdlInternalError, InvalidArgument, NotInitialized
from ddlcore.messages.to_coordinator import STOP
from ddlcore.messages.to_rank import AgreedCall
from ddlcore.runtime.counted_calls import CountedCalls
from ddlcore.runtime.job_failure import JobFailure


def calls_until_stop(job: Job, most: int, step: bool = True, pause_s: float = 0.0) -> int:
    """Return the number of the call that returned True; 0 if none of ``most`` did."""
    chance = random.Random(job.rank)
    for call in range(1, most + 1):
        if step:
            ddlcore.allreduce(np.ones(8, np.float32), name="gradient")
        if pause_s:
            time.sleep(chance.random() * pause_s)
        if ddlcore.should_stop():
            assert ddlcore.should_stop()  # and it stays true
            return call
    return 0


@pytest.mark.parametrize("asks", range(3))
@pytest.mark.parametrize("step", [True, False], ids=["a collective in each step", "no collective"])
def test_all_ranks_stop_at_the_same_call(asks: int, step: bool) -> None:
    """Without collectives, nothing else keeps the ranks together."""

    def play(rank: int, job: Job) -> int:
        if rank == asks:
            timer = threading.Timer(0.05, job.stop_calls.__setattr__, ("wanted", f"request on rank {rank}"))
            timer.start()
        return calls_until_stop(job, 5000, step, 0.002)

    with World(3) as world:
        stopped = world.run(play)
    assert len(set(stopped)) == 1 and stopped[0] > 0


@pytest.mark.parametrize("how", ["not sent yet", "sent", "heard of", "carried out"])
def test_a_request_that_was_not_carried_out_is_made_again_in_the_next_world(how: str) -> None:
    """The coordinator that had it may be lost."""
    failure = JobFailure()
    before, after = (CountedCalls(STOP, "should_stop()", failure) for _ in range(2))
    if how == "heard of":
        before.agreed(AgreedCall(STOP, 0, 5, "SIGTERM on rank 1"))
    else:
        before.wanted = "SIGTERM on rank 1"
    if how in ("sent", "carried out"):
        assert before.take_wanted() == "SIGTERM on rank 1" and before.take_wanted() == ""
    if how == "carried out":
        before.agreed(AgreedCall(STOP, 0, 1, "SIGTERM on rank 1"))
        assert before.called()
    after.go_on_from(before)
    assert after.take_wanted() == ("" if how == "carried out" else "SIGTERM on rank 1")


def test_a_request_of_the_new_world_is_kept() -> None:
    failure = JobFailure()
    before, after = (CountedCalls(STOP, "should_stop()", failure) for _ in range(2))
    before.asked, after.wanted = "old", "new"
    after.go_on_from(before)
    assert after.take_wanted() == "new"


def test_requests_of_all_ranks_at_once() -> None:
    def play(rank: int, job: Job) -> int:
        assert calls_until_stop(job, 10) == 0
        ddlcore.request_stop(f"wall time on rank {rank}")
        return calls_until_stop(job, 5000, False, 0.001)

    with World(4) as world:
        stopped = world.run(play)
    assert len(set(stopped)) == 1 and stopped[0] > 0


def test_a_steady_step_sends_no_message() -> None:
    def play(rank: int, job: Job) -> None:
        assert calls_until_stop(job, 50) == 0
        before = ddlcore.stats()["control_messages"]
        assert calls_until_stop(job, 200) == 0
        assert ddlcore.stats()["control_messages"] == before

    with World(2) as world:
        world.run(play)


def test_ranks_with_different_numbers_of_batches() -> None:
    """Rank 1 has fewer batches and waits in join(): the world stops after it, where rank 0 does, too."""

    def play(rank: int, job: Job) -> list[bool]:
        seen = []
        for epoch in range(3):
            stops = False
            for batch in range(30 if rank == 0 else 10):
                ddlcore.allreduce(np.ones(4, np.float32), name="gradient")
                if rank == 0 and (epoch, batch) == (1, 15):
                    ddlcore.request_stop()
                    time.sleep(1.5)  # the request is sent within a second: rank 1 stands in join()
                stops = stops or ddlcore.should_stop()
            ddlcore.join()
            seen.append(stops or ddlcore.should_stop())
        return seen

    with World(2) as world:
        assert world.run(play) == [[False, True, True]] * 2


def test_a_world_of_one() -> None:
    with World(1) as world:

        def play(rank: int, job: Job) -> None:
            assert not ddlcore.should_stop()
            ddlcore.request_stop()
            assert calls_until_stop(job, 5000, pause_s=0.01) > 0

        world.run(play)


def test_a_rank_that_dies_while_the_others_agree() -> None:
    """Whoever waits for the answer gets the error of the job."""

    def play(rank: int, job: Job) -> str:
        if rank == 2:
            job.stop_calls.wanted = "x"
            time.sleep(0.2)
            raise KeyError("a fault of the script")
        try:
            while not ddlcore.should_stop():
                ddlcore.allreduce(np.ones(4), name="x")
        except DdlInternalError as error:
            return type(error).__name__
        return "stopped"

    with World(3) as world, pytest.raises(KeyError):
        world.run(play)


def test_another_thread_shuts_down_while_a_call_waits() -> None:
    """The answer never comes: the call raises."""

    def play(rank: int, job: Job) -> str:
        assert not ddlcore.should_stop()
        job.stop_calls.count()  # as if the question had come
        timer = threading.Timer(0.2, job.shutdown)
        timer.start()
        with pytest.raises(Closed, match="shut down before the ranks had agreed"):
            ddlcore.should_stop()
        timer.join()
        return "raised"

    with World(2) as world:
        assert world.run(play) == ["raised"] * 2


def test_bad_arguments() -> None:
    with World(1) as world:

        def play(rank: int, job: Job) -> None:
            for reason in ("", 5):
                with pytest.raises(InvalidArgument, match="the reason is a text"):
                    ddlcore.request_stop(reason)  # type: ignore[arg-type]

        world.run(play)
    with pytest.raises(NotInitialized):
        ddlcore.should_stop()
    with pytest.raises(NotInitialized):
        ddlcore.request_stop()


def test_a_misspelt_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDL_STOP_SIGNALS", "SIGTREM")
    ddlcore.init()
    try:
        with pytest.raises(InvalidArgument, match="SIGTREM is no signal's name"):
            ddlcore.should_stop()
    finally:
        ddlcore.shutdown()


@pytest.mark.parametrize(("names", "is_handled"), [("", False), ("SIGUSR2", True)])
def test_only_the_signals_that_are_wanted_get_a_handler(
    names: str, is_handled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty DDL_STOP_SIGNALS, SIGTERM and SIGUSR1 end the process, as they do without should_stop()."""
    monkeypatch.setattr(stopping, "_listener", stopping._Listener())  # the listener of this process may listen already
    monkeypatch.setenv("DDL_STOP_SIGNALS", names)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    ddlcore.init()
    try:
        assert not ddlcore.should_stop()
        after = {number: signal.getsignal(number) for number in before}
        assert after[signal.SIGTERM] == after[signal.SIGUSR1] == signal.SIG_DFL
        assert (after[signal.SIGUSR2] != signal.SIG_DFL) == is_handled
    finally:
        ddlcore.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_use_job_is_respected() -> None:
    """Each thread asks its own job."""

    def play(rank: int, job: Job) -> bool:
        with use_job(job):
            return ddlcore.should_stop()

    with World(2) as world:
        assert world.run(play) == [False, False]
