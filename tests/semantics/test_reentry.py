"""Public functions from signal handlers, finalizers and several threads at once: they work, or raise a named error at once."""

from __future__ import annotations

import gc
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import Operations
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from tests.faults.harness import Launch

pytestmark = pytest.mark.timeout(120)

Say = Callable[..., None]
NAMED = (ddl.ReentrantCall, ddl.NotInitialized, ddl.Closed)


class Calls:
    """What handlers and finalizers do: they look, or start an operation that the other rank starts as well, sooner or later."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.handles: list[Any] = []
        self.refused = self.looked = 0
        self.wrong: list[BaseException] = []
        self._random = random.Random(seed)
        self._busy = False

    def __call__(self) -> None:
        if self._busy:  # a finalizer within this call
            return
        self._busy = True
        try:
            if self._random.random() < 0.7:
                assert ddl.stats()["buckets_void"] >= 0
                self.looked += 1
            elif self._random.random() < 0.5:
                self.start()
            else:
                ddl.init()  # again: no effect
                ddl.stop_timeline()  # there is none, or one that a thread has begun
        except NAMED:
            self.refused += 1
        except BaseException as error:
            self.wrong.append(error)
        finally:
            self._busy = False

    def start(self) -> None:
        """The next of this rank."""
        number = len(self.handles)
        self.handles.append(ddl.allreduce_async(np.full(3, float(number)), name=f"{self.kind}.{number}", op=ddl.Sum))

    def settle(self) -> None:
        """Both ranks come to the same number of operations, and all of them end with their value."""
        self._busy = True
        most = int(ddl.allreduce(np.array([float(len(self.handles))]), name=f"most.{self.kind}", op=ddl.Max)[0])
        while len(self.handles) < most:
            self.start()
        for number, handle in enumerate(self.handles):
            assert (handle.wait() == 2.0 * number).all(), f"{self.kind}.{number}"
        assert self.wrong == [], self.wrong
        self.handles.clear()
        self._busy = False


class Doomed:
    """Garbage in a cycle, which is collected at any moment, on any thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.me = self

    def __del__(self) -> None:
        self.call()


@contextmanager
def often() -> Iterator[None]:
    """Garbage is collected all the time."""
    before = gc.get_threshold()
    gc.set_threshold(30, 5, 5)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Beside:
    """Threads that run until they are told to stop; what one of them raises is raised at the end."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._raised: list[BaseException] = []

    def run(self, call: Callable[[], None]) -> None:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._raised.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive(), "a thread hangs"
        assert self._raised == [], self._raised


def is_pestered(rank: int, say: Say) -> None:
    """Two rounds of init, steps with everything beside them, and shutdown."""
    folder = tempfile.TemporaryDirectory()
    refused = looked = 0
    for generation in range(2):
        ddl.init()
        in_handler, in_finalizer = Calls("handler", rank), Calls("finalizer", rank + 5)

        def strike(number: int, frame: FrameType | None, call: Calls = in_handler) -> None:
            call()

        signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
        beside = Beside()
        polled: list[Any] = []

        def reduce(polled: list[Any] = polled) -> None:
            for step in range(60):
                handle = ddl.allreduce_async(np.full(7, step + rank), name="beside", op=ddl.Sum)
                polled.append(handle)
                assert (handle.wait() == 2 * step + 1).all()

        def poll(over: threading.Event = beside.over, polled: list[Any] = polled) -> None:
            while not over.wait(0.001):
                for handle in polled[-3:]:
                    handle.poll()
                    handle.wait()
                assert ddl.stats()["seconds"]["user"] >= 0

        def record(name: str = f"{folder.name}/{generation}.json") -> None:
            try:
                ddl.start_timeline(name)
            except NAMED:
                return
            time.sleep(0.1)
            ddl.stats()

        for call in (reduce, poll, record):
            beside.run(call)
        with often():
            for step in range(100):
                Doomed(in_finalizer)
                x = np.full(20, float(step + rank))
                ddl.allreduce_(x, name="x", op=ddl.Sum)
                assert (x == 2 * step + 1).all(), f"step {step}: {x[0]}"
                handles = [ddl.allreduce_async(np.full(4, float(i)), name=f"h{i}", op=ddl.Sum) for i in range(3)]
                assert [float(handle.wait()[0]) for handle in handles] == [0.0, 2.0, 4.0]
                assert (ddl.allreduce(np.ones(2), op=ddl.Sum) == 2).all()
                if step % 30 == 10:
                    both = ddl.add_process_set([rank]) if ddl.size() == 1 else ddl.add_process_set([0])
                    assert ddl.remove_process_set(both)
        signal.setitimer(signal.ITIMER_REAL, 0)
        beside.end()
        for calls in (in_handler, in_finalizer):
            calls.settle()
            refused += calls.refused
            looked += calls.looked
        gc.collect()
        ddl.shutdown()
        ddl.shutdown()
    folder.cleanup()
    say("done", f"{looked} {refused}")


def test_handlers_finalizers_and_threads_at_once() -> None:
    """Two processes: no call hangs, no value is wrong, and what cannot be served says so by name."""
    launch = Launch(2, is_pestered)
    ends = [launch.await_word(rank, "done", 80.0)[1].split() for rank in (0, 1)]
    assert launch.close() == []
    assert all(int(looked) > 5 for looked, _ in ends), ends


def imports_nothing(rank: int, say: Say) -> None:
    """Every kind of operation, twice."""
    ddl.init()
    before = set(sys.modules)
    x = np.ones(4, np.float32)
    for _ in range(2):
        for op in (ddl.Sum, ddl.Average, ddl.Min, ddl.Max, ddl.Product):
            ddl.allreduce(x, name=f"reduced.{op}", op=op)
            ddl.allreduce_(x, name=f"in_place.{op}", op=op)
        ddl.grouped_allreduce([x, x], name="grouped", op=ddl.Sum)
        ddl.allgather(x, name="gathered")
        ddl.broadcast(x, 0, name="broadcast")
        ddl.alltoall(x, name="exchanged")
        ddl.reducescatter(x, name="scattered")
        ddl.barrier()
        handle = ddl.allreduce_async(x, name="waited")
        handle.poll()
        handle.wait()
        assert ddl.remove_process_set(ddl.add_process_set([0]))
        ddl.stats()
    say("done", sorted(set(sys.modules) - before))
    ddl.shutdown()


def test_operations_import_nothing() -> None:
    """A signal handler that imports a module, as ddl does, may break the import that it interrupts (Python 3.11)."""
    launch = Launch(2, imports_nothing)
    told = [launch.await_word(rank, "done")[1] for rank in (0, 1)]
    assert launch.close() == []
    assert told == ["[]", "[]"]


def leaves_in_a_handler(rank: int, say: Say) -> None:
    """Handlers call shutdown() while the main thread waits, or is inside: it takes effect once it is called outside."""
    ddl.init()
    left = False

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal left
        try:
            ddl.shutdown()
            left = True
        except ddl.ReentrantCall:
            signal.setitimer(signal.ITIMER_REAL, 0.0007)

    signal.signal(signal.SIGALRM, strike)
    ended = "never"
    for step in range(100_000):
        if step == 30 and rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            ddl.allreduce(np.ones(3), name="x")
        except NAMED as error:
            ended = type(error).__name__
            break
        except ddl.PeerLost as error:
            ended = str(error)
            break
    say("done", f"{left} {ended}")
    ddl.shutdown()


def test_shutdown_in_a_handler() -> None:
    launch = Launch(2, leaves_in_a_handler)
    first, second = (launch.await_word(rank, "done", 60.0)[1] for rank in (0, 1))
    assert launch.close() == []
    assert first in ("True Closed", "True NotInitialized")
    assert second.startswith("False rank 0 lost")


def test_a_finalizer_of_the_tensor_that_a_call_lets_go_of() -> None:
    """The last reference is dropped in the middle of ddl's own work, on a thread of the user's or of ddl's."""
    operations = Operations(NumpyAdapter())

    def play(rank: int, job: Job) -> tuple[int, int]:
        told: list[str] = []

        class Owner:
            def __del__(self) -> None:
                assert job.stats()["buckets_void"] == 0
                try:
                    operations.allreduce_async(np.ones(2), name="never", job=job).wait()
                    told.append("made")
                except ddl.ReentrantCall:
                    told.append("refused")

        x = np.ones(5)
        entry = operations.persistent_allreduce(x, name="x", op=ddl.Sum, job=job)
        for _ in range(40):
            x[:] = 1.0
            job.start_request(entry, x.ctypes.data, Owner())
            entry.wait()
            assert (x == job.size).all()
        return told.count("refused"), told.count("made")

    for size in (1, 2):
        for refused, made in run_world(size, play):
            assert (refused, made) == (40, 0)


def test_finalizers_on_every_thread_of_a_world() -> None:
    """Of users and of ddl, wherever the collector happens to run; ``stats`` answers on all of them."""
    operations = Operations(NumpyAdapter())

    def play(rank: int, job: Job) -> int:
        looked = []
        for step in range(150):
            Doomed(lambda: looked.append(job.stats()["steps"]))
            got = operations.allreduce_async(np.full(3, step), name="x", op=ddl.Sum, job=job).wait()
            assert (got == 2 * step).all()
        gc.collect()
        return len(looked)

    with often():
        assert min(run_world(2, play)) > 0
