"""The tensor queue by itself, in replay: what a fork, an error and a thread that was called away leave behind."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddlcore.errors import MismatchError
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_coordinator import Leave
from ddlcore.messages.to_rank import Arranged, Bucket, Planned, Resume
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.launching_alone import launch_alone
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.request import IDLE, PENDING, Entry, PersistentRequest
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.submission import Submission
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.types import Buffer, DType, Kind
from tests.runtime.waiting import waiter_of

SPEC = Spec(Kind.ALLREDUCE, DType.F32, (4,))
RUNNER = 7  # the id of a user's thread


def replaying() -> tuple[TensorQueue, PersistentRequest]:
    """A tensor queue whose schedule is one bucket of one tensor, and that tensor."""
    completion = Completion()
    tensor_queue = TensorQueue(completion, Outbox(lambda: None))
    epochs = Epochs(tensor_queue)
    epochs.learn(Arranged(0, b"", (Planned(0, Kind.ALLREDUCE, ("x",), (encode(SPEC),), False),)))
    epochs.resume(Resume(1, 0, 0, ((0, -1),)), {0: (0,)}, 0)
    return tensor_queue, PersistentRequest(
        waiter_of(completion), 0, "x", SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,))
    )


def lookout_of(tensor_queue: TensorQueue) -> tuple[Lookout, Outbox]:
    """What watches the tensor queue, with an engine that does nothing, and what it has said to the coordinator."""
    outbox = Outbox(lambda: None)
    return Lookout(tensor_queue, cast("Any", None), lambda: None, outbox, Meter()), outbox


def test_a_forked_child_launches_nothing_of_its_parent() -> None:
    tensor_queue, entry = replaying()
    Submission(tensor_queue).start_request(entry, 64, None, waits=True)
    assert tensor_queue.is_ready()
    tensor_queue.disown(lambda: RuntimeError("forked"))
    assert not tensor_queue.is_ready()
    assert tensor_queue.launch() is None


def test_an_error_that_nobody_waited_for_is_not_the_next_call_s() -> None:
    tensor_queue, entry = replaying()
    Submission(tensor_queue).start_request(entry, 64, None)
    entry.fail(MismatchError("of an earlier call"))
    assert entry.state == IDLE
    tensor_queue.launch()
    Submission(tensor_queue).start_request(entry, 128, None)
    entry.complete(0, None, -1)
    entry.wait()
    assert entry.source.address == 128


def test_the_engine_is_woken_for_a_bucket_whose_thread_was_called_away() -> None:
    """The thread said that it would wait, and never came to it."""
    tensor_queue, entry = replaying()
    woken = []
    Submission(tensor_queue).start_request(entry, 64, None, waits=True)
    tensor_queue.work.notify = lambda n=1: woken.append(n)  # type: ignore[method-assign]  # what is counted
    lookout, outbox = lookout_of(tensor_queue)
    lookout.look()
    assert woken
    assert not list(outbox.taken())


def test_a_bucket_that_is_ready_behind_another_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sits in the one before, for which this one may have to run first; with a slot or without, it asks to leave."""
    completion, names = Completion(), ("x", "y")
    tensor_queue = TensorQueue(completion, Outbox(lambda: None))
    lookout, outbox = lookout_of(tensor_queue)
    waiter = waiter_of(completion)
    planned = tuple(Planned(0, Kind.ALLREDUCE, (name,), (encode(SPEC),), False) for name in names)
    epochs = Epochs(tensor_queue)
    epochs.learn(Arranged(0, b"", planned))
    epochs.resume(Resume(1, 0, 0, ((0, -1),)), {0: (0,)}, 0)
    x, y = (PersistentRequest(waiter, 0, name, SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,))) for name in names)
    now_s = 0.0
    monkeypatch.setattr("ddlcore.runtime.tensor_queue.time.monotonic", lambda: now_s)
    for with_slot in (False, True):
        Submission(tensor_queue).start_request(x, 64, None)
        assert tensor_queue.launch() is not None
        Submission(tensor_queue).start_request(y, 64, None)
        assert (y.replay is tensor_queue.replay, tensor_queue.is_ready()) == (True, True)
        lookout.look()
        assert outbox.taken()
        now_s += 10.0
        lookout.look()
        (leave,) = list(outbox.taken())
        assert isinstance(leave, Leave) and (leave.epoch, leave.slow) == (1, True), f"with slot: {with_slot}"
        lookout.look()
        assert list(outbox.taken()) == [], "it asks once"
        assert tensor_queue.launch() is not None
        for launch, entry in zip(list(tensor_queue.launches.values()), (x, y)):
            tensor_queue.delivered(launch)
            entry.complete(0, None, -1)


def test_those_before_a_refused_one_are_asked_for() -> None:
    completion, woken = Completion(), []
    tensor_queue = TensorQueue(completion, Outbox(lambda: woken.append(1)))
    entry = PersistentRequest(waiter_of(completion), 0, "x", SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,)))
    with pytest.raises(ValueError, match="already in flight"):
        Submission(tensor_queue).start_all([(entry, 64, None), (entry, 64, None)])
    assert woken == [1]
    request = tensor_queue.take_request()
    assert request is not None
    assert len(request.asks) == 1


def with_slot() -> tuple[TensorQueue, PersistentRequest, Launch[Entry]]:
    """The same after the first call, which gave the tensor its slot; and its launch."""
    tensor_queue, entry = replaying()
    Submission(tensor_queue).start_request(entry, 64, None, waits=True)
    launch = tensor_queue.launch()
    assert launch is not None
    tensor_queue.delivered(launch)
    entry.complete(0, None, -1)
    return tensor_queue, entry, launch


class Here:
    """Stands for a way to run a bucket that the caller may take."""

    def resume(self, launch: object, operation: object = None) -> Any:
        raise AssertionError("no bucket is run here")

    def forget(self) -> None:
        raise AssertionError("no bucket is run here")


def test_a_call_that_is_a_bucket_by_itself_is_started_and_launched_at_once() -> None:
    tensor_queue, entry, launch = with_slot()
    launch.position.resumable = Here()
    with tensor_queue.lock:
        again = launch_alone(tensor_queue, RUNNER, entry, 128, "owner", 0)
        assert again is not None
        assert (again.place, again.number, list(again.entries or ())) == (1, 2, [entry])
        assert (entry.source.address, entry.source.owner, entry.pending) == (128, "owner", True)
        assert (tensor_queue.own, tensor_queue.running) == (again, RUNNER)


def test_a_call_is_not_launched_alone_where_another_must_run_it() -> None:
    tensor_queue, entry, launch = with_slot()
    stranger = PersistentRequest(waiter_of(), 0, "y", SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,)))
    with tensor_queue.lock:
        assert launch_alone(tensor_queue, RUNNER, stranger, 64, None, 0) is None  # it has no slot
        assert launch_alone(tensor_queue, RUNNER, entry, 64, None, 0) is None  # nobody has found out how it is run
        launch.position.resumable = Here()
        entry.state = PENDING
        assert launch_alone(tensor_queue, RUNNER, entry, 64, None, 0) is None  # it is under way
        entry.state = IDLE
    assert Epochs(tensor_queue).freeze(1) is not None
    with tensor_queue.lock:
        assert launch_alone(tensor_queue, RUNNER, entry, 64, None, 0) is None  # nothing is launched any more
    assert not tensor_queue.is_ready()


def test_a_negotiated_slot_that_waits_behind_a_tensor_is_watched_when_that_is_launched_alone() -> None:
    """Its bucket may have to wait for a tensor that comes only after it: the wait must be noticed."""
    completion, ragged = Completion(), Spec(Kind.ALLGATHER, DType.U8, (), is_object=True)
    tensor_queue = TensorQueue(completion, Outbox(lambda: None))
    waiter = waiter_of(completion)
    planned = (
        Planned(0, Kind.ALLREDUCE, ("x",), (encode(SPEC),), False),
        Planned(0, Kind.ALLREDUCE, ("y",), (encode(SPEC),), False),
        Planned(0, Kind.ALLGATHER, ("r",), (encode(ragged),), True),
    )
    epochs = Epochs(tensor_queue)
    epochs.learn(Arranged(0, b"", planned))
    epochs.resume(Resume(1, 0, 0, ((0, -1),)), {0: (0,)}, 0)
    x, y = (
        PersistentRequest(waiter, 0, name, SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,))) for name in ("x", "y")
    )
    for request in (x, y):  # they get their slots
        Submission(tensor_queue).start_request(request, 64, None)
    replay = tensor_queue.replay
    assert replay is not None
    for request in (x, y):
        launch = tensor_queue.launch()
        assert launch is not None
        tensor_queue.delivered(launch)
        request.complete(0, None, -1)
        launch.position.resumable = Here()

    def gather() -> None:
        handle = Handle(waiter, 1, list)
        Submission(tensor_queue).submit([Entry(handle, 0, 0, "r", ragged, encode(ragged), rows=(1,))])
        assert tensor_queue.take_request() is not None
        tensor_queue.answered(tensor_queue._serial)
        assert tensor_queue.fill(Bucket(1, 0, Kind.ALLGATHER, ("r",)))

    gather()
    launch = tensor_queue.launch()
    assert launch is not None
    assert launch.bucket is not None
    tensor_queue.delivered(launch)
    gather()  # of the next period, before its x and y
    with tensor_queue.lock:
        assert launch_alone(tensor_queue, RUNNER, x, 64, None, 0) is not None
    assert tensor_queue.waits_since_s is not None


def test_a_name_whose_slot_is_for_another_spec_ends_the_replay() -> None:
    """At once, and not as a suspicion that somebody is slow: the schedule fits no more."""
    tensor_queue, entry = replaying()
    lookout, outbox = lookout_of(tensor_queue)
    other = Spec(Kind.ALLREDUCE, DType.F32, (5,))
    handle = Handle(entry.waiter, 1, list)
    Submission(tensor_queue).submit([Entry(handle, 0, 0, "x", other, encode(other))])
    lookout.look()
    (leave,) = list(outbox.taken())
    assert isinstance(leave, Leave) and (leave.epoch, leave.slow) == (1, False)
    lookout.look()
    assert list(outbox.taken()) == [], "it asks once"
    request = tensor_queue.take_request()
    assert request is not None
    assert [ask.name for ask in request.asks] == ["x"]
