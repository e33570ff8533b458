"""Blocking calls without a name that are run by kept requests: which calls are, and what they leave in the tensor queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import global_process_set
from ddlcore.api.operations import Operations
from ddlcore.api.reduce_calls import ReduceArguments
from ddlcore.api.unnamed_calls import UnnamedBlockingCalls
from ddlcore.api.world import use_job
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.errors import InvalidArgument, MismatchError
from ddlcore.process.job import Job
from ddlcore.runtime.launching_alone import launch_unnamed
from ddlcore.runtime.request import ANONYMOUS, IDLE, Given, PersistentMove, PersistentRequest
from ddlcore.testing import World
from ddlcore.types import Buffer, DType
from tests.runtime.test_interrupted import DATA, Rank

pytestmark = pytest.mark.timeout(120)

SIZE = 3
STEPS = 12  # enough for replay
NEW = 6  # tensors that come up later
LIMIT_S = 60.0
SUM = ReduceArguments(ddl.Sum, 1.0, 1.0, "none")
OPERATIONS = Operations(NumpyAdapter())

BACKENDS = pytest.mark.parametrize("backend", ["shm", "threads"])
RUN_BY_USERS = {
    "shm"
}  # backends whose collectives a user's thread may run; for others, calls are made in the usual way


class Calls:
    """Blocking calls without a name, and how many of them a kept request has run. Each checks its values."""

    def __init__(self, rank: int) -> None:
        self._rank, self._ranks = rank, range(SIZE)
        self._unnamed = UnnamedBlockingCalls(OPERATIONS, global_process_set)
        self.kept = 0

    def _made(self, done: bool, usual: Callable[[], Any]) -> None:
        self.kept += done
        if not done:
            usual()

    def allreduce(self, step: int, count: int = 4) -> None:
        tensor = np.full(count, float(step + self._rank))
        done = self._unnamed.allreduce(tensor, SUM, LIMIT_S)
        self._made(done, OPERATIONS.allreduce_async(tensor, output=tensor, op=ddl.Sum).wait if not done else list)
        assert tensor.tolist() == [3.0 * step + 3] * count

    def broadcast(self, step: int) -> None:
        tensor = np.full(4, float(step + self._rank))
        root = step % SIZE
        done = self._unnamed.broadcast(tensor, root, LIMIT_S)
        self._made(done, lambda: OPERATIONS.broadcast_async(tensor, root, output=tensor).wait())
        assert tensor.tolist() == [float(step + root)] * 4

    def allgather(self, step: int) -> None:
        tensor, output = np.full((1, 2), float(step + self._rank)), np.zeros((SIZE, 2))
        done = self._unnamed.allgather(tensor, output, LIMIT_S)
        self._made(done, lambda: OPERATIONS.allgather_async(tensor, output=output).wait())
        assert output[:, 0].tolist() == [float(step + rank) for rank in self._ranks]

    def alltoall(self, step: int) -> None:
        tensor = np.array([[100.0 * step + 10 * self._rank + to] for to in self._ranks])
        output = np.zeros((SIZE, 1))
        done = self._unnamed.alltoall(tensor, output, LIMIT_S)
        self._made(done, lambda: OPERATIONS.alltoall_async(tensor, output=output).wait())
        assert output[:, 0].tolist() == [100.0 * step + 10 * giver + self._rank for giver in self._ranks]

    def reducescatter(self, step: int) -> None:
        tensor, output = np.full((SIZE, 2), float(step + self._rank)), np.zeros((1, 2))
        done = self._unnamed.reducescatter(tensor, output, SUM, LIMIT_S)
        self._made(done, lambda: OPERATIONS.reducescatter_async(tensor, output=output, op=ddl.Sum).wait())
        assert output.tolist() == [[3.0 * step + 3] * 2]

    def barrier(self, step: int) -> None:
        self._made(self._unnamed.barrier(LIMIT_S), ddl.barrier)


KINDS = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter", "barrier")


def run(body: Callable[[Calls, Job], Any], backend: str) -> list[Any]:
    with World(SIZE, backend=backend, settings={"replay": True}) as world:
        results: list[Any] = world.run(lambda rank, job: body(Calls(rank), job))
        return results


@BACKENDS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_run_by_a_kept_request_in_replay(kind: str, backend: str) -> None:
    """Without a message, and with nothing left behind in the tensor queue."""

    def train(calls: Calls, job: Job) -> int:
        for step in range(3 * STEPS):
            getattr(calls, kind)(step)
        told, calls.kept = job.stats()["control_messages"], 0
        for step in range(3 * STEPS, 3 * STEPS + 2 * SIZE):
            getattr(calls, kind)(step)
        assert job.stats()["control_messages"] == told
        assert job.tensor_queue.unfinished.entries == job.tensor_queue.unfinished.requests == {}
        return calls.kept

    assert run(train, backend) == [2 * SIZE * (backend in RUN_BY_USERS)] * SIZE


@BACKENDS
def test_all_kinds_in_one_loop_beside_asynchronous_calls(backend: str) -> None:
    """A call whose turn has not come is made in the usual way, and so keeps its place in the order of the calls."""

    def train(calls: Calls, job: Job) -> int:
        for step in range(4 * STEPS):
            early = ddl.allreduce_async(np.full(4, float(step)), op=ddl.Sum)  # as the blocking allreduce below
            for kind in KINDS:
                getattr(calls, kind)(0)
            assert early.wait().tolist() == [3.0 * step] * 4
        return calls.kept

    assert (min(run(train, backend)) > STEPS) == (backend in RUN_BY_USERS)


@BACKENDS
def test_values_are_exact_when_ranks_leave_replay(backend: str) -> None:
    """A second thread brings up tensors that make the ranks leave the schedule: void calls are made again, in order.

    Each new tensor comes up when all ranks have replayed since the one before.
    """

    def train(calls: Calls, job: Job) -> int:
        def bring_up() -> None:
            with use_job(job):
                for number in range(NEW):
                    assert turns.acquire(timeout=LIMIT_S)
                    assert ddl.allreduce(np.full(3, number), op=ddl.Sum, name=f"new {number}")[0] == SIZE * number

        turns = threading.Semaphore(0)
        beside = threading.Thread(target=bring_up)
        beside.start()
        step, given, kept, goes_on = 0, 0, 0, True
        while goes_on:
            for kind in KINDS:
                getattr(calls, kind)(step)
            step += 1
            replayed = calls.kept > kept if backend in RUN_BY_USERS else step % STEPS == 0
            all_replayed, goes_on = ddl.allreduce(
                np.array([replayed, not beside.is_alive()], np.int32), op=ddl.Min
            ) == [1, 0]
            if all_replayed and given < NEW:
                turns.release()
                given, kept = given + 1, calls.kept
        beside.join()
        left = job.tensor_queue.unfinished.requests.values()
        assert all(request.state == IDLE for request in left)
        return calls.kept

    assert (min(run(train, backend)) >= NEW) == (backend in RUN_BY_USERS)


@BACKENDS
def test_another_call_in_its_place_is_a_mismatch(backend: str) -> None:
    def train(calls: Calls, job: Job) -> None:
        for step in range(2 * STEPS):
            calls.allreduce(step)
        with pytest.raises(MismatchError):
            calls.allreduce(0, 4 if job.rank != 1 else 5)
        for step in range(2 * STEPS):
            calls.allreduce(step)

    run(train, backend)


def test_tensors_that_are_not_row_major_are_left_to_the_usual_way() -> None:
    def train(calls: Calls, job: Job) -> None:
        unnamed = UnnamedBlockingCalls(OPERATIONS, global_process_set)
        turned = np.zeros((2, 3)).T
        for step in range(2 * STEPS):
            assert not unnamed.allreduce(turned, SUM, LIMIT_S)
            calls.allreduce(step)
        assert not unnamed.allreduce(np.zeros(4, complex), SUM, LIMIT_S)
        read_only = np.zeros(4)
        read_only.flags.writeable = False
        assert not unnamed.allreduce(read_only, SUM, LIMIT_S)
        with pytest.raises(InvalidArgument, match="output has shape"):
            unnamed.allgather(np.zeros((1, 2)), np.zeros((SIZE, 3)), LIMIT_S)
        calls.allreduce(0)

    run(train, "threads")


# --- what a void bucket leaves behind, without threads


@pytest.mark.parametrize("kind", [PersistentRequest, PersistentMove])
def test_a_void_call_is_requested_under_its_number(kind: type[PersistentRequest]) -> None:
    """After it has ended, the queue forgets it with the next call, whose number is another one."""
    rank = Rank(("",))
    queue = rank.tensor_queue
    entry = kind(rank.waiter, 0, ANONYMOUS, rank.request("x").spec, DATA, rank.request("x").source)
    with queue.lock:
        given = _given() if kind is PersistentMove else None
        launch = launch_unnamed(queue, 7, entry, 64, given, 0)
    assert launch is not None and (entry.name, queue.unfinished.requests) == (f"{ANONYMOUS}0.0", {})
    assert rank.epochs.freeze(1) is not None
    queue.running, queue.own = 0, None
    assert queue.put_back(launch)
    rank.epochs.discover(2)
    request = queue.take_request()
    assert request is not None and [ask.name for ask in request.asks] == [f"{ANONYMOUS}0.0"]
    assert queue.take(0, [entry.name]) == [entry]
    entry.complete(0, None, 5)
    assert not entry.pending and list(queue.unfinished.requests) == [(0, f"{ANONYMOUS}0.0")]
    queue.unnamed.forget_readmitted(queue.unfinished)
    assert queue.unfinished.requests == {}


def test_a_request_is_not_started_again_before_its_user_has_seen_the_error() -> None:
    """Another thread makes an equal call at the wrong moment. Its call is made in the usual way, so no error is lost."""
    rank = Rank(("",))
    queue = rank.tensor_queue
    entry = rank.request(ANONYMOUS)
    with queue.lock:
        launch = launch_unnamed(queue, 7, entry, 64, None, 0)
    assert launch is not None
    queue.delivered(launch)
    entry.fail(RuntimeError("failed"))
    queue.running, queue.own = 0, None
    assert not entry.pending
    assert not rank.engine.user_threads.run_unnamed(entry, 64, None)
    assert (entry.user, str(entry.error)) == (7, "failed")
    entry.user = 0  # as its user's thread does at the end of the call
    assert rank.engine.user_threads.run_unnamed(entry, 64, None)
    assert (entry.user, entry.error) == (0, None)


def _given() -> Any:
    return Given(Buffer(0, 0, DType.F32, (0,)), None, ())
