"""The control thread: carries requests to the coordinator, and the coordinator's answers to the engine.

The control thread never runs a collective and never waits for a collective. So it can answer the coordinator even while
the engine waits for other ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from ddlcore.errors import DdlInternalError, DeadlineExceeded, MismatchError, PeerLost, ReplicasDiffer
from ddlcore.messages import (
    STOP,
    Adjust,
    AgreedCall,
    Alive,
    Answer,
    Arranged,
    Bucket,
    Busy,
    CoordinatorLost,
    CountCalls,
    Differ,
    Digests,
    Drain,
    Explain,
    Failure,
    Farewell,
    Freeze,
    FromCoordinator,
    Leave,
    Lost,
    Notice,
    Probe,
    Profile,
    Pulse,
    Refused,
    ReplayStatus,
    Resume,
    Sample,
    Settle,
    Settled,
    Show,
    Stack,
    Stalled,
    StopRequest,
    ToCoordinator,
    Welcome,
    Where,
    WorldReport,
)
from ddlcore.observe.stacks import stack_of
from ddlcore.runtime.alarm import Alarm
from ddlcore.runtime.checks import describe
from ddlcore.runtime.counted_calls import CountedCalls
from ddlcore.runtime.engine import Engine, Todo
from ddlcore.runtime.events import Events
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.patience import Patience
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.threads import OwnThread

log = logging.getLogger("ddl")


class Channel(Protocol):
    """Those methods of a connection to the coordinator that the control thread uses; see ddlcore.control.channel."""

    def send(self, message: ToCoordinator) -> None: ...

    def receive(self, timeout_s: float) -> list[FromCoordinator]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class ControlThread:
    """The thread that exchanges messages with the coordinator. Only this thread uses the channel from ``start`` on."""

    def __init__(
        self,
        channel: Channel,
        tensor_queue: TensorQueue,
        engine: Engine,
        failure: JobFailure,
        broken: Callable[[Callable[[str], BaseException]], None],
        sets: ProcessSets,
        meter: Meter,
        patience: Patience,
        rank: int,
        name: str,
        outbox: Outbox,
        events: Events,
        counted: Mapping[str, CountedCalls],
        adjust: Callable[[dict[str, str | int | float | bool]], None],
        explain: Callable[[Explain], Sample],
        dump: Callable[[str, str], object],
    ) -> None:
        """Create the thread that carries messages between the coordinator and ``engine``.

        ``channel`` is the connection to the coordinator. ``broken(make)`` is called when the job cannot continue, for
        example because ranks are lost; ``make(during)`` returns the error for the operation ``during``. ``counted``
        has a counter for each kind of call at which all ranks may act together. ``adjust`` applies new settings and is
        called on the engine's thread. ``explain`` returns the values that the coordinator asks for. ``dump(reason,
        text)`` saves a record of what this rank did last; it is called at a stall and when a signal asks for it.
        """
        self._events = events
        self._counted = counted
        self._stop_calls = counted[STOP]
        self._adjust = adjust
        self._explain = explain
        self._dump = dump
        self.user_thread = threading.get_ident()  # the thread whose stack is reported
        self.dump_wanted = False  # set by a signal handler, which must not take a lock
        self._sets = sets
        self._meter = meter
        self._rank = rank
        self._channel = channel
        self._tensor_queue = tensor_queue
        self._engine = engine
        self._failure = failure
        self._broken = broken
        self._outbox = outbox
        self._stopping = False
        self._alarm = Alarm(patience)
        self._engaged: deque[Busy] = deque()  # other work than buckets that the engine was given, in order
        self._patience_s = self._alarm.interval_s
        self.session = ""
        self.report: WorldReport | None = None  # on this world of an elastic job
        self.refusal = ""  # why this world cannot begin
        self.late = False  # whether that is because ranks have not called init in time
        self.welcomed = threading.Event()  # set by Welcome, Refused or the end of the job
        self.settled = threading.Event()  # set by Settled or the end of the job
        self.parted = threading.Event()  # set by Farewell or the end of the job
        self._thread = OwnThread(target=self._loop, name=name)

    def start(self) -> None:
        self._thread.start()

    def engage(self, what: str, todo: Callable[[], None], has_deadline: bool = False) -> None:
        """Have the engine call ``todo``, which may have to wait for other ranks. Any thread may call this.

        ``what`` describes ``todo`` in messages about stalls. ``has_deadline`` says that ``todo`` has a time limit of
        its own. For reports of stalls, ``todo`` counts as begun as soon as it is in the engine's queue, because the
        items before it in the queue may wait for the same ranks.
        """
        self._engaged.append(Busy(what, -1, 0, (), has_deadline=has_deadline))

        def do() -> None:
            try:
                todo()
            finally:
                self._engaged.popleft()

        self._engine.post(do)

    def stop(self, timeout_s: float) -> None:
        """Have the thread send the remaining messages, close the channel and end.

        Wait for the end of the thread, at most ``timeout_s`` seconds.
        """
        self._stopping = True
        self._channel.wake()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        self._engine.threads.add(get_ident())
        try:
            while True:
                # Read before the outbox is emptied: a message that was put there before ``stop`` set the flag is then
                # still sent. If the flag were read afterwards, a last message such as Done could be lost.
                stopping = self._stopping
                for message in self._outbox.taken():
                    self._send(message)
                if stopping:
                    break
                if self.dump_wanted:
                    self.dump_wanted = False
                    self._dump("signal", "somebody asked by a signal")
                wanted = self._stop_calls.take_wanted()
                if wanted:
                    self._send(StopRequest(wanted))
                # Everything below runs at least once a second, even without a message. So this also finishes calls that
                # a signal handler interrupted, if no other thread takes the tensor queue's lock in the meantime.
                stuck = self._tensor_queue.stuck()
                if stuck is not None:
                    self._tensor_queue.leave(stuck, slow=True)
                for alarm in self._alarm.look(self._doing, time.monotonic()):
                    if isinstance(alarm, Busy) or alarm.alarm:
                        self._dump("stall", "this rank stands at one bucket")
                    self._send(alarm)
                request = self._tensor_queue.take_request()
                if request is not None:
                    self._send(request)
                pause = self._tensor_queue.take_pause()
                if pause is not None:
                    self._send(pause)
                for received in self._channel.receive(self._patience_s):
                    self._receive(received)
        except Exception as error:  # the coordinator is unreachable or there is a bug: nothing can continue
            self._end(error)
        finally:
            self._channel.close()
            self.settled.set()
            self.welcomed.set()
            self.parted.set()

    def _end(self, error: Exception) -> None:
        known = isinstance(error, DdlInternalError)
        text = str(error) if known else f"the control thread failed: {type(error).__name__}: {error}"

        def make(during: str) -> BaseException:
            failure = DdlInternalError(f"{text} (during {during})" if during else text)
            failure.__cause__ = error
            return failure

        self._broken(make)

    def _send(self, message: ToCoordinator) -> None:
        if isinstance(message, Leave):
            message = msgspec.structs.replace(
                message, replay_status=self._alarm.since(self._tensor_queue.replay_status())
            )
        if isinstance(message, ReplayStatus | Busy | Alive | Stack):
            self._meter.stalls += 1
        elif isinstance(message, (Pulse, Profile, Digests, Sample, Settle)):
            self._meter.pulses += 1
        else:
            self._meter.control += 1
        self._channel.send(message)

    def _receive(self, message: FromCoordinator) -> None:
        if isinstance(message, Where):
            self._meter.stalls += 1
            replay_status = self._tensor_queue.replay_status()
            if replay_status is not None:
                self._send(replay_status)
            return
        if isinstance(message, Probe):
            self._meter.stalls += 1
            self._send(Alive(self.describe_state()))
            return
        if isinstance(message, Show):
            self._meter.stalls += 1
            self._dump("stall", "other ranks wait for this one")
            self._send(Stack(stack_of(self.user_thread)))
            return
        if isinstance(message, Notice):
            log.warning("%s", message.text)
            return
        if isinstance(message, Explain):
            self._send(self._explain(message))
            return
        if isinstance(message, Settled):
            self.settled.set()
            return
        self._meter.control += 1
        if isinstance(message, Answer):
            for item in message.items:
                self._item(item)
            self._tensor_queue.answered(message.serial)
        elif isinstance(message, Freeze):
            self._tensor_queue.flight.note("freeze", epoch=message.epoch)
            self._events.frozen(message.epoch)
            frozen = self._tensor_queue.freeze(message.epoch)
            if frozen is not None:
                self._send(frozen)
        elif isinstance(message, Drain):
            # What was decided must leave the tensor queue first (``_todo`` takes it), because ``Engine.drain`` asks
            # again for everything that is still in it: the same tensor would be requested twice.
            self._tensor_queue.flight.note("drain", epoch=message.epoch, highest=message.highest, lowest=message.lowest)
            for item in message.items:
                self._note(item)
            after = [self._todo(item) for item in message.items]
            what = f"the end of a replay (Drain of epoch {message.epoch})"
            self.engage(what, partial(self._engine.drain, message))
            for todo in after:
                if todo is not None:
                    self._engine.post(todo)
        elif isinstance(message, Lost):
            ranks, reason = message.ranks, message.reason
            self._broken(lambda during: PeerLost(ranks, reason, during))
            self.welcomed.set()
            self.parted.set()
        elif isinstance(message, CoordinatorLost):
            reason = message.reason
            self._broken(lambda during: DdlInternalError(f"{reason} (during {during})" if during else reason))
            self.welcomed.set()
            self.settled.set()
            self.parted.set()
        elif isinstance(message, Stalled):
            text = message.text
            self._broken(lambda during: DeadlineExceeded(f"{text} (during {during})" if during else text))
            self.welcomed.set()
            self.parted.set()
        elif isinstance(message, Differ):
            self._broken(partial(_differ, message))
            self.settled.set()
            self.parted.set()
        elif isinstance(message, Welcome):
            self.session, self.report = message.session, message.report
            self.welcomed.set()
        elif isinstance(message, Refused):
            self.refusal, self.late = message.text, message.late
            self.welcomed.set()
            self.parted.set()
        elif isinstance(message, CountCalls):
            self._send(self._counted[message.kind].count())
        elif isinstance(message, AgreedCall):
            self._counted[message.kind].agreed(message)
        elif isinstance(message, Farewell):
            self.parted.set()

    def _item(self, item: Bucket | Failure | Arranged | Resume | Adjust) -> None:
        self._note(item)
        if isinstance(item, Bucket) and self._tensor_queue.fill(item):
            return
        todo = self._todo(item)
        if todo is not None:
            self._engine.post(todo)

    def _note(self, item: Bucket | Failure | Arranged | Resume | Adjust) -> None:
        if isinstance(item, Bucket):
            self._events.decided(item)

    def _todo(self, item: Bucket | Failure | Arranged | Resume | Adjust) -> Todo | None:
        """Return the item that must be put into the engine's queue because of ``item``; None if there is no such item.

        An ``item`` that needs no work of the engine, such as a failure or a schedule, is processed here. An Adjust is
        put into the engine's queue here.
        """
        if isinstance(item, Bucket):
            return item, self._tensor_queue.take(item.set_id, item.names)
        if isinstance(item, Resume):
            self._tensor_queue.flight.note("resume", epoch=item.epoch, schedule=item.schedule, start=item.start)
            return lambda: self._engine.resume(item, self._sets.all(), self._rank)
        if isinstance(item, Adjust):
            self.engage("a change of settings", partial(self._adjust, dict(item.values)), True)
            return None
        if isinstance(item, Failure):
            self._fail(item)
        else:
            self._tensor_queue.learn(item)
        return None

    def _doing(self) -> ReplayStatus | Busy | None:
        """Return which work of this rank other ranks may delay, or None if there is no such work now.

        Such work is a negotiated bucket, a drain or another item of the engine, or a bucket of the schedule that is
        launched or has some of its tensors.
        """
        bucket = self._engine.bucket
        if bucket is not None:
            what = f"{bucket.kind.name.lower()} {describe(bucket.names, bucket.set_id)}"
            return Busy(what, bucket.index, bucket.set_id, bucket.names)
        with contextlib.suppress(IndexError):  # the engine has just ended it
            return self._engaged[0]
        replay_status = self._tensor_queue.replay_status()
        if replay_status is None or not (
            replay_status.launched or len(replay_status.missing) < len(replay_status.names)
        ):
            return None
        return replay_status

    def describe_state(self) -> str:
        """Return a text that says what this rank is doing now. Any thread may call this."""
        doing = self._doing()
        if isinstance(doing, Busy):
            return f"its engine is in {doing.what}"
        if doing is not None:
            where = "in" if doing.launched else "at"
            return f"it is {where} {describe(doing.names, doing.set_id)} of its schedule (place {doing.place})"
        pending = self._tensor_queue.pending()
        if pending:
            return f"it waits for {describe(pending, 0)}"
        return "all its operations are complete; it is running its own code"

    def _fail(self, failure: Failure) -> None:
        self._tensor_queue.flight.note("failure", set_id=failure.set_id, names=failure.names, error=failure.error)
        entries = self._tensor_queue.take(failure.set_id, failure.names)
        error: BaseException
        if failure.error == "lost":
            error = PeerLost(failure.ranks, failure.text, describe(failure.names, failure.set_id))
        else:
            error = MismatchError(failure.text, failure.kinds, failure.parts)
        self._engine.fail(entries, error)


def _differ(message: Differ, during: str) -> BaseException:
    text = f"{message.text}\n  seen during {during}" if during else message.text
    distances = dict(message.distances)
    return ReplicasDiffer(text, message.tensor, message.groups, message.step, message.agreed_step, distances)
