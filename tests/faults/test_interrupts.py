"""A signal that calls a waiting thread away from a bucket it was running itself: nothing is lost, nobody hangs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import Operations, current_job
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.request import Entry, PersistentRequest
from ddlcore.types import Kind
from tests.faults.harness import Launch

pytestmark = pytest.mark.timeout(240)

HERE = f"{os.sep}ddlcore{os.sep}"
Say = Callable[..., None]
PAUSE_S = 0.6  # how long rank 1 keeps rank 0 waiting; interrupts come within it


def is_interrupted(rank: int, say: Say) -> None:
    """Rank 0 is interrupted, many times, while it waits for rank 1 in a replayed bucket, and waits again."""
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
    say("replayed", ddl.stats()["buckets_replayed"])
    say("done", caught)
    ddl.shutdown()


def interrupt(times: int) -> None:
    for _ in range(times):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_wait_can_be_repeated() -> None:
    """KeyboardInterrupt comes at once, and the engine goes on with the bucket: it ends as if nothing had been."""
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
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and not all(r.at("done") or r.at("raised") for r in launch.reports):
        time.sleep(0.02)
    ends = [report.at("done") or report.at("raised") for report in launch.reports]
    assert launch.close() == [], f"hung: {ends}"
    assert all(ends), ends
    for report in launch.reports:
        raised = report.at("raised")
        if raised is not None:
            assert "signal's handler raised" in raised[1] or "PeerLost" in raised[1] or "InterruptedError" in raised[1]


HAMMER_S = 4.0


class Struck(BaseException):
    """What the hammer raises."""


class Hammer:
    """A timer that strikes at random moments, and raises wherever the main thread is in ddl's code, or called by it."""

    def __init__(self, seed: int) -> None:
        self.struck = 0
        self._armed = False
        self._random = random.Random(seed)
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if not self._armed:
            return  # it came just before ``rest``
        self.set()
        while frame is not None:
            if HERE in frame.f_code.co_filename:
                self.struck += 1
                raise Struck
            frame = frame.f_back

    def set(self) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-5, 1.5e-3))

    def rest(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_hammered(rank: int, say: Say) -> None:
    """All ways to start and to wait, in replay and where the schedule does not serve; each call is repeated if it was not made."""
    ddl.init()
    job = current_job()
    operations = Operations(NumpyAdapter())
    arrays = [np.zeros(50 + i) for i in range(4)]
    alone, *group = [operations.persistent_allreduce(x, name=f"x{i}", op=ddl.Sum) for i, x in enumerate(arrays)]
    grouped = [np.zeros(9), np.zeros(7)]
    adapter = NumpyAdapter()

    def start_request(one: PersistentRequest, before: int, x: Any) -> None:
        if one.starts == before:
            job.start_and_wait(one, x.ctypes.data, x)
        else:
            one.wait()

    def start_all(ones: Sequence[tuple[PersistentRequest, int, Any]]) -> None:
        job.start_all([(one, x.ctypes.data, x) for one, before, x in ones if one.starts == before])
        for one, _, _ in ones:
            one.wait()

    def submit(handle: Handle, entries: Sequence[Entry]) -> None:
        if not handle.submitted:
            job.submit(entries, True)
        handle.wait()

    hammer = Hammer(rank + 7)
    until_s = time.monotonic() + HAMMER_S
    step, goes_on = 0, True

    def insist(call: Callable[..., None], *args: Any) -> None:
        hammer.set()
        while True:
            try:
                call(*args)
                hammer.rest()
                return
            except Struck:
                pass

    while goes_on:
        step += 1
        for i, x in enumerate(arrays):
            x[:] = step + rank + i
        for x in grouped:
            x[:] = step * (rank + 1)
        insist(start_request, alone, alone.starts, arrays[0])
        insist(start_all, [(one, one.starts, x) for one, x in zip(group, arrays[1:])])
        buffers = [adapter.buffer(x, elementwise=True) for x in grouped]
        handle = Handle(job.waiter, 2, list)
        specs = [Spec(Kind.ALLREDUCE, b.dtype, b.shape, ddl.Sum, group=2) for b in buffers]
        entries = [
            Entry(handle, i, 0, f"allreduce.g[{i}]", spec, encode(spec), b, b)
            for i, (spec, b) in enumerate(zip(specs, buffers))
        ]
        insist(submit, handle, entries)
        for i, x in enumerate(arrays):
            assert (x == 2 * (step + i) + 1).all(), f"step {step}, tensor {i}: {x[0]}"
        for x in grouped:
            assert (x == 3 * step).all(), f"step {step}, group: {x[0]}"
        if step % 40 == 0:  # the schedule has no place for it
            y = np.full(5, float(step))
            other = operations.persistent_allreduce(y, name=f"y{step}", op=ddl.Sum)
            insist(start_request, other, 0, y)
            assert (y == 2 * step).all()
        if step % 10 == 0:
            last = np.array([float(rank == 0 and time.monotonic() > until_s)])
            ddl.allreduce_(last, name="last", op=ddl.Sum)
            goes_on = not last[0]
    stats = job.stats()
    assert not job.waiter.completion.wanted
    assert job.lookout.pending() == []
    say("done", f"{hammer.struck} {step} {stats['buckets_replayed']} {stats['buckets_negotiated']}")
    ddl.shutdown()


@pytest.mark.timeout(180)
def test_a_hammer_of_handlers_that_raise() -> None:
    """Thousands of interrupts on both ranks, in whatever ddl does: every call is made once, every result is exact."""
    launch = Launch(2, is_hammered)
    ends = [launch.await_word(rank, "done", 80.0)[1].split() for rank in (0, 1)]
    assert launch.close() == []
    for struck, _, replayed, negotiated in ends:
        assert int(struck) > 20
        assert int(replayed) > 0
        assert int(negotiated) > 0
