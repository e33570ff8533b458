"""A signal that calls a waiting thread away from a batch it was running itself: nothing is lost, nobody hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import ddlcore as ddl
from tests.faults.harness import Launch

pytestmark = pytest.mark.timeout(60)

Say = Callable[..., None]
PAUSE_S = 0.6  # how long rank 1 keeps rank 0 waiting; interrupts come within it


def is_interrupted(rank: int, say: Say) -> None:
    """Rank 0 is interrupted, many times, while it waits for rank 1 in a replayed batch, and waits again."""
    ddl.init()
    x = np.zeros(1000)
    caught = 0
    for step in range(30):
        x[:] = step + rank
        if rank == 1 and step in (20, 25):
            time.sleep(PAUSE_S)
        if rank == 0 and step in (20, 25):
            threading.Thread(target=interrupt, args=(4,)).start()
            handle = ddl.allreduce_async_(x, name="x", op=ddl.Sum)
            while True:
                try:
                    handle.wait()
                    break
                except KeyboardInterrupt:
                    caught += 1
            time.sleep(0.4)  # the interrupts that are left come while nothing is under way
        else:
            ddl.allreduce_(x, name="x", op=ddl.Sum)
        assert (x == 2 * step + 1).all(), f"step {step}: {x[0]}"
    say("replayed", ddl.stats()["batches_replayed"])
    say("done", caught)
    ddl.shutdown()


def interrupt(times: int) -> None:
    for _ in range(times):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_wait_can_be_repeated() -> None:
    """KeyboardInterrupt comes at once, and the engine goes on with the batch: it ends as if nothing had been."""
    launch = Launch(2, is_interrupted)
    _, caught = launch.await_word(0, "done")
    launch.await_word(1, "done")
    assert int(launch.await_word(0, "replayed")[1]) > 10
    assert launch.close() == []
    assert int(caught) >= 2


def is_taken_away(rank: int, say: Say) -> None:
    """A handler that raises from the middle of ``help`` at random moments of many short calls."""
    ddl.init()
    x = np.zeros(10)

    def raises(number: int, frame: object) -> None:
        raise InterruptedError("a handler's own error")

    signal.signal(signal.SIGALRM, raises)
    caught = 0
    for step in range(600):
        x[:] = step + rank
        handle = ddl.allreduce_async_(x, name="x", op=ddl.Sum)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (step % 97))
        while True:
            try:
                handle.wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except InterruptedError:
                caught += 1
        assert (x == 2 * step + 1).all(), f"step {step}: {x[0]}"
    say("done", caught)
    ddl.shutdown()


def test_handlers_that_raise_at_any_moment() -> None:
    """Either every call ends with its value, or the job ends with an error that says what happened; never a hang."""
    launch = Launch(2, is_taken_away)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and not all(r.at("done") or r.at("raised") for r in launch.reports):
        time.sleep(0.02)
    ends = [report.at("done") or report.at("raised") for report in launch.reports]
    assert launch.close() == [], f"hung: {ends}"
    assert all(ends), ends
    for report in launch.reports:
        raised = report.at("raised")
        if raised is not None:
            assert "signal's handler raised" in raised[1] or "PeerLost" in raised[1] or "InterruptedError" in raised[1]
