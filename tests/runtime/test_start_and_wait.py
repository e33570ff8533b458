"""A call that is a bucket by itself, called away by a signal's handler while it is launched."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Arranged, Planned, Resume
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.engine import Engine
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.launching_alone import launch_alone
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.request import PersistentRequest
from ddlcore.runtime.schedule import Replay
from ddlcore.runtime.submission import Submission
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Buffer, DType, Kind
from tests.runtime.waiting import NoDevices, waiter_of

SPEC = Spec(Kind.ALLREDUCE, DType.F32, (4,))


class Called(BaseException):
    """What a handler raises."""


class Run:
    """A way to run a bucket that the caller may take."""

    def resume(self, launch: object, operation: object = None) -> Any:
        raise AssertionError("no bucket is run here")

    def forget(self) -> None:
        raise AssertionError("no bucket is run here")


def ready(run: Run) -> tuple[Engine, TensorQueue, PersistentRequest, list[BaseException]]:
    """An engine whose thread has not begun, in replay of one tensor, and what broke the job."""
    completion = Completion()
    tensor_queue = TensorQueue(completion, Outbox(lambda: None))
    epochs, submission = Epochs(tensor_queue), Submission(tensor_queue)
    epochs.learn(Arranged(0, b"", (Planned(0, Kind.ALLREDUCE, ("x",), (encode(SPEC),), False),)))
    epochs.resume(Resume(1, 0, 0, ((0, -1),)), {0: (0,)}, 0)
    broken: list[BaseException] = []
    none = cast("Any", None)
    executor: Any = SimpleNamespace(execute=None, replay=None)
    meter, failure = Meter(), JobFailure()
    in_flight = DevicesInFlight(completion, meter, NoDevices())
    engine = Engine(executor, none, tensor_queue, completion, in_flight, failure, broken.append, meter, "engine")
    waiter = waiter_of(completion, engine.user_threads)
    entry = PersistentRequest(waiter, 0, "x", SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,)))
    submission.start_request(entry, 64, None, waits=True)  # gives it its slot
    launch = tensor_queue.launch()
    assert launch is not None
    tensor_queue.delivered(launch)
    entry.complete(0, None, -1)
    launch.position.resumable = run
    return engine, tensor_queue, entry, broken


def test_who_is_called_away_before_anything_has_changed_may_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Replay.step`` changes nothing, and is the last call before the bucket is launched."""
    engine, tensor_queue, entry, broken = ready(Run())

    def strike(*args: object) -> None:
        raise Called

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "step", strike)
        with pytest.raises(Called):
            engine.user_threads.start_and_wait(entry, 64, None)
    assert not broken
    assert not entry.pending
    with tensor_queue.lock:
        assert launch_alone(tensor_queue, 7, entry, 64, None, 0) is not None


def test_a_call_that_is_not_launched_here_leaves_the_engine_free() -> None:
    """It has no slot yet: the engine's thread, not this one, runs it."""
    engine, tensor_queue, entry, broken = ready(Run())
    entry.replay = entry
    waiting = threading.Thread(target=engine.user_threads.start_and_wait, args=(entry, 64, None), daemon=True)
    entry.position.resumable = None  # only the engine's thread can run it
    waiting.start()
    for _ in range(100):
        if tensor_queue.is_ready():
            break
        waiting.join(0.05)
    assert tensor_queue.is_ready()
    assert not tensor_queue.running
    launch = tensor_queue.launch()
    assert launch is not None
    tensor_queue.delivered(launch)
    entry.complete(0, None, -1)
    waiting.join(20)
    assert not waiting.is_alive()
    assert not broken


def test_what_a_thread_has_run_waits_for_the_end_of_a_freeze() -> None:
    """The bucket is complete, but the ranks freeze: only Drain tells whether it is valid, so the engine keeps it."""
    engine, tensor_queue, entry, _ = ready(Run())
    with tensor_queue.lock:
        launch = launch_alone(tensor_queue, 7, entry, 64, "owner", 0)
    assert launch is not None
    assert Epochs(tensor_queue).freeze(1) is not None
    assert not engine.user_threads._land(launch, lambda: [None], 0, True)
    assert (entry.pending, entry.source.owner, list(tensor_queue.launches.values())) == (True, "owner", [launch])
    tensor_queue.frozen = False
    assert engine.user_threads._land(launch, lambda: [None], 0, True)
    assert (entry.pending, entry.source.owner, tensor_queue.launches, tensor_queue.running) == (False, None, {}, 0)
