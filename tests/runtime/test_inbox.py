"""The inbox by itself, in replay: what a fork, an error and a thread that was called away leave behind."""

from __future__ import annotations

from ddlcore.errors import MismatchError
from ddlcore.messages import Arranged, Planned, Resume, Spec, encode
from ddlcore.runtime.handle import Completion
from ddlcore.runtime.inbox import Inbox
from ddlcore.runtime.request import IDLE, Recurring
from ddlcore.types import Buffer, DType, Kind

SPEC = Spec(Kind.ALLREDUCE, DType.F32, (4,))


def replaying() -> tuple[Inbox, Recurring]:
    """An inbox whose schedule is one batch of one tensor, and that tensor."""
    completion = Completion()
    inbox = Inbox(completion, lambda: None)
    inbox.learn(Arranged(0, b"", (Planned(0, Kind.ALLREDUCE, ("x",), (encode(SPEC),), False),)))
    inbox.resume(Resume(1, 0, 0, ((0, -1),)), {0: (0,)}, 0)
    return inbox, Recurring(completion, 0, "x", SPEC, encode(SPEC), Buffer(64, 4, DType.F32, (4,)))


def test_a_forked_child_launches_nothing_of_its_parent() -> None:
    inbox, entry = replaying()
    inbox.again(entry, 64, None, waits=True)
    assert inbox.is_ready()
    inbox.disown(lambda: RuntimeError("forked"))
    assert not inbox.is_ready()
    assert inbox.launch() is None


def test_an_error_that_nobody_waited_for_is_not_the_next_call_s() -> None:
    inbox, entry = replaying()
    inbox.again(entry, 64, None)
    entry.fail(MismatchError("of an earlier call"))
    assert entry.state == IDLE
    inbox.launch()
    inbox.again(entry, 128, None)
    entry.complete(0, None, -1)
    entry.wait()
    assert entry.source.address == 128


def test_the_engine_is_woken_for_a_batch_whose_thread_was_called_away() -> None:
    """The thread said that it would wait, and never came to it."""
    inbox, entry = replaying()
    woken = []
    inbox.again(entry, 64, None, waits=True)
    inbox.work.notify = lambda n=1: woken.append(n)  # type: ignore[method-assign]  # what is counted
    assert inbox.stuck() is None
    assert woken
