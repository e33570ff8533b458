"""Carries out what the coordinator decides for a rank: which buckets run, what fails, and how replay begins and ends.

This module uses no thread, socket or clock: tests drive it event by event.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ddlcore.errors import MismatchError, PeerLost
from ddlcore.messages.observing import Busy
from ddlcore.messages.to_coordinator import Frozen
from ddlcore.messages.to_rank import Adjust, Answer, Arranged, Bucket, Drain, Failure, Freeze, Resume
from ddlcore.runtime.checks import describe
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.events import NO_EVENTS, Events
from ddlcore.runtime.request import Entry, Todo
from ddlcore.runtime.tensor_queue import TensorQueue


class WorkQueue(Protocol):
    """What carries out the decisions, one after the other and in the order in which they are posted.

    In a job this is Parts, which passes most calls on to the engine.
    """

    def post(self, item: Todo) -> None:
        """Append ``item`` to the queue: a bucket with its entries, or a function. Any thread may call this."""

    def resume(self, message: Resume) -> None:
        """Begin to replay a schedule. A function in the queue calls this, as it does the next two methods."""

    def drain(self, message: Drain) -> None:
        """Run the buckets that other ranks have launched and this rank has not, and deliver the valid ones.

        If no Resume follows in ``message``, return to negotiation.
        """

    def adjust(self, message: Adjust) -> None:
        """Use new values of settings from now on."""

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None) -> None:
        """Fail the operations of ``entries`` with ``error``. Any thread may call this."""


class Decisions:
    """Passes the decisions of the coordinator on to a tensor queue and to the ``work`` behind it.

    Only the control thread uses this object, except where a method says otherwise.
    """

    def __init__(self, tensor_queue: TensorQueue, epochs: Epochs, work: WorkQueue, events: Events = NO_EVENTS) -> None:
        self._tensor_queue = tensor_queue
        self._epochs = epochs
        self._work = work
        self._events = events
        self._engaged: deque[Busy] = deque()  # other work than buckets that was posted, in order

    def engage(self, what: str, todo: Callable[[], None], has_deadline: bool = False) -> None:
        """Post ``todo``, which may have to wait for other ranks. Any thread may call this.

        ``what`` describes ``todo`` in messages about stalls. ``has_deadline`` says that ``todo`` has a time limit of
        its own. For reports of stalls, ``todo`` counts as begun as soon as it is in the queue, because the items
        before it in the queue may wait for the same ranks.
        """
        self._work.post(self._engaging(what, todo, has_deadline))

    def _engaging(self, what: str, todo: Callable[[], None], has_deadline: bool = False) -> Callable[[], None]:
        """Return ``todo`` as a function that must be posted next; see ``engage``."""
        self._engaged.append(Busy(what, -1, 0, (), has_deadline=has_deadline))

        def do() -> None:
            try:
                todo()
            finally:
                self._engaged.popleft()

        return do

    def engaged(self) -> Busy | None:
        """Return the first piece of work given to ``engage`` that has not ended; None: there is none. Any thread may ask."""
        with contextlib.suppress(IndexError):  # the engine has just ended it
            return self._engaged[0]
        return None

    def answer(self, message: Answer) -> None:
        """Carry out the decisions in ``message``."""
        for item in message.items:
            self._carry_out(item)
        self._tensor_queue.answered(message.serial)

    def freeze(self, message: Freeze) -> Frozen | None:
        """Launch no further bucket. Return the reply to the coordinator; None: it follows when the schedule is known."""
        self._tensor_queue.flight.note("freeze", epoch=message.epoch)
        self._events.frozen(message.epoch)
        return self._epochs.freeze(message.epoch)

    def drain(self, message: Drain) -> None:
        """Run what other ranks have launched, and then carry out the decisions in ``message``."""
        self._tensor_queue.flight.note("drain", epoch=message.epoch, highest=message.highest, lowest=message.lowest)
        for item in message.items:
            self._note(item)
        what = f"the end of a replay (Drain of epoch {message.epoch})"
        drain = self._engaging(what, partial(self._work.drain, message))
        # What was decided must leave the tensor queue before the drain is posted (``_todo`` takes it), because
        # ``WorkQueue.drain`` asks again for everything that is still in it: the same tensor would be requested twice.
        after = [self._todo(item) for item in message.items]
        for todo in (drain, *after):
            if todo is not None:
                self._work.post(todo)

    def _carry_out(self, item: Bucket | Failure | Arranged | Resume | Adjust) -> None:
        self._note(item)
        if isinstance(item, Bucket) and self._tensor_queue.fill(item):
            return
        todo = self._todo(item)
        if todo is not None:
            self._work.post(todo)

    def _note(self, item: Bucket | Failure | Arranged | Resume | Adjust) -> None:
        if isinstance(item, Bucket):
            self._events.decided(item)

    def _todo(self, item: Bucket | Failure | Arranged | Resume | Adjust) -> Todo | None:
        """Return what must be posted because of ``item``. Return None if ``item`` needs no work, and carry it out."""
        if isinstance(item, Bucket):
            return item, self._tensor_queue.take(item.set_id, item.names)
        if isinstance(item, Resume):
            self._tensor_queue.flight.note("resume", epoch=item.epoch, schedule=item.schedule, start=item.start)
            return partial(self._work.resume, item)
        if isinstance(item, Adjust):
            return self._engaging("a change of settings", partial(self._work.adjust, item), True)
        if isinstance(item, Failure):
            self._fail(item)
        else:
            self._epochs.learn(item)
        return None

    def _fail(self, failure: Failure) -> None:
        self._tensor_queue.flight.note("failure", set_id=failure.set_id, names=failure.names, error=failure.error)
        entries = self._tensor_queue.take(failure.set_id, failure.names)
        error: BaseException
        if failure.error == "lost":
            error = PeerLost(failure.ranks, failure.text, describe(failure.names, failure.set_id))
        else:
            error = MismatchError(failure.text, failure.kinds, failure.parts)
        self._work.fail(entries, error)
