"""The engine thread: runs a rank's buckets one after the other, in the order in which they were decided."""

from __future__ import annotations

import logging
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.messages.to_rank import Bucket, Drain, Planned
from ddlcore.runtime.agenda import Agenda
from ddlcore.runtime.checks import called
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.delivery import Deliver, Later, Staged
from ddlcore.runtime.dispatch import RunsBuckets, ShownDispatcher
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.landing import Landing
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.ranges import Ranges
from ddlcore.runtime.request import Entry, Todo, brought
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.tensor_queue import GONE, TensorQueue
from ddlcore.runtime.transport_calls import Unserved
from ddlcore.runtime.user_threads import UserThreads
from ddlcore.runtime.waiter import SLICE_S
from ddlcore.threads import OwnThread
from ddlcore.types import Kind

log = logging.getLogger("ddl")
CLOSE_S = 60.0  # for work that runs on a device when the job ends: peers may need it
CLOSED_S = 10.0  # for closing the communicators after that
FAILURE_WAIT_S = 2.0  # how long to wait for the news that a peer died, which explains a transport error better


def _LAND() -> None:
    """Stand in the engine's queue as a sign: when the engine finds it there, it calls ``Engine._land`` instead.

    This function itself is never called.
    """


class Engine:
    """The thread that owns a rank's communicators and executors, and runs the rank's buckets.

    The engine first runs the items that were passed to ``post``, in the order of the calls. Then it runs the buckets of
    the schedule that are ready. ``broken(error)`` is called when the transport or an executor fails on this rank. If
    ``ranges`` is given, every bucket runs within a profiler range that has the bucket's name.
    """

    def __init__(
        self,
        dispatcher: RunsBuckets,
        sets: ProcessSets,
        tensor_queue: TensorQueue,
        completion: Completion,
        in_flight: DevicesInFlight,
        failure: JobFailure,
        broken: Callable[[BaseException], None],
        meter: Meter,
        name: str,
        ranges: Ranges | None = None,
    ) -> None:
        dispatcher = dispatcher if ranges is None else ShownDispatcher(dispatcher, ranges)
        self._execute, self._run_replayed = dispatcher.execute, dispatcher.replay
        self._meter = meter
        self._sets = sets
        self._tensor_queue = tensor_queue
        self._completion = completion
        self._failure = failure
        self._broken = broken
        self._landing = Landing(tensor_queue, completion)
        self._agenda = Agenda()
        self.user_threads = UserThreads(
            tensor_queue, completion, self._agenda, self._landing, in_flight, meter, ranges, self._broke, self._go_on
        )
        self._closing = False  # the engine has ended, and only devices still work
        self.bucket: Bucket | None = None  # the negotiated bucket that runs now, for the stall check
        self._events = tensor_queue.events
        self._after: deque[Callable[[], None]] = deque()  # functions of callers, to be called when no lock is held
        self._held: list[tuple[Launch[Entry], Deliver]] = []
        self._in_flight = in_flight
        self._since_ns = 0  # when the last bucket, or the last wait for a bucket, ended
        self._me = -2  # the id of the engine's thread
        self._thread = OwnThread(target=self._loop, name=name)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: Todo) -> None:
        """Append ``item`` to the engine's queue. Any thread may call this.

        ``item`` is a bucket with its entries, or a function that the engine's thread will call.
        """
        with self._tensor_queue.lock:
            self._agenda.todo.append(item)
            self._tensor_queue.work.notify()

    def stop(self, timeout_s: float) -> bool:
        """End the engine after all items in its queue have run, and close the communicators.

        Return whether the engine has ended within the time limits. The items in the queue have ``timeout_s`` seconds.
        After that, work that is still queued on devices has CLOSE_S + CLOSED_S seconds more, but only as long as the
        job has not failed.
        """
        with self._tensor_queue.lock:
            self._agenda.stopped = True
            self._tensor_queue.work.notify()
        self._thread.join(timeout_s)
        until_s = time.monotonic() + CLOSE_S + CLOSED_S
        while self._closing and self._thread.is_alive() and not self._failure.given and time.monotonic() < until_s:
            self._thread.join(SLICE_S)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        meter = self._meter
        self._me = get_ident()
        self.user_threads.own_threads.add(self._me)
        self._since_ns = now_ns()
        todo: Todo | Launch[Entry] | None
        while True:
            todo = None  # the last item must not keep its tensors alive while the engine waits
            todo = self._next()
            if todo is None:
                break
            if isinstance(todo, Launch):
                self._replay(todo)
            elif callable(todo):
                if todo is _LAND:
                    self._land()
                    meter.busy_ns += now_ns() - self._since_ns
                else:
                    self._call(todo)
                self._since_ns = now_ns()
                continue
            else:
                self.bucket = todo[0]
                self._run(*todo)
                self.bucket = None
            ended_ns = now_ns()
            meter.busy_ns += ended_ns - self._since_ns
            if self._events.on:
                self._events.completed(*_ran(todo), self._since_ns, ended_ns)
            self._since_ns = ended_ns
        self._closing = True
        self._sets.close(CLOSE_S)

    def _next(self) -> Todo | Launch[Entry] | None:
        """Wait for the next item that the engine must run, and return it. Return None if the engine has to end."""
        slept, agenda, tensor_queue = False, self._agenda, self._tensor_queue
        with tensor_queue.work:
            if tensor_queue.running == self._me:
                tensor_queue.running = 0
            while True:
                # Only one thread may run buckets at a time, and ``running`` says which. Both this thread and a waiting
                # user thread take an item and set ``running`` under the same lock. If the item were taken first and
                # ``running`` set later, the other thread could launch the next bucket before this one, and two ranks
                # would enter their collectives in different orders.
                if tensor_queue.running == GONE:
                    self.user_threads.hand_back()
                if not tensor_queue.running:
                    todo = agenda.todo.popleft() if agenda.todo else tensor_queue.launch()
                    if todo is None and self._in_flight.is_due(slept, agenda.stopped):
                        todo = _LAND
                    if todo is not None or agenda.stopped:
                        tensor_queue.running = self._me
                        return todo
                idle_ns = now_ns()
                slept = not tensor_queue.work.wait(self._in_flight.look_s())
                self._since_ns = now_ns()
                self._meter.idle_ns += self._since_ns - idle_ns

    def _call(self, todo: Callable[[], None]) -> None:
        try:
            todo()
        except BaseException as error:
            self._explain(error)
            self.abandon()

    # --- buckets that were decided

    def _run(self, bucket: Bucket, entries: Sequence[Entry | None]) -> None:
        if self._failure.given:
            self.fail(entries, None, bucket.index)
            return
        recorded = self._tensor_queue.flight.begin(bucket)
        try:
            outcomes = self._execute(bucket, entries)
        except Unserved as error:
            self._tensor_queue.flight.done(recorded, "failed")
            self.fail(entries, error, bucket.index)
        except BaseException as error:
            self._explain(error)
            self.fail(entries, None, bucket.index)
        else:
            self._tensor_queue.flight.done(recorded)
            if bucket.kind is Kind.REMOVE_SET:
                with self._tensor_queue.lock:
                    self._tensor_queue.unfinished.forget(bucket.result)
            elif bucket.kind is Kind.JOIN:
                with self._tensor_queue.lock:
                    self._tensor_queue.unnamed.next_generation()
            self._meter.negotiated += 1
            self._meter.nbytes[bucket.kind] += brought(entries)
            self._deliver(entries, outcomes, bucket.index)

    # --- buckets of a schedule

    def _replay(self, launch: Launch[Entry]) -> None:
        """Run a bucket of the schedule with this rank's data, and deliver its results or keep them for later."""
        deliver = self._take_part(launch, partial(self._run_replayed, launch, "fusion"))
        if deliver is not None:
            self._settle(launch, deliver)

    def _settle(self, launch: Launch[Entry], deliver: Deliver | Later) -> None:
        """Deliver a bucket that has run, or keep the bucket until it is known whether it is valid or void.

        If this rank is frozen, a bucket is kept until the message Drain says whether the bucket is valid. If
        ``deliver`` is a Later, the bucket has only been queued on a device. Such a bucket is kept until one of two
        things happens: the device has completed it, or the hosts have told each other that this bucket or a later one
        of its process set is valid.
        """
        # A device completes a bucket before the host knows whether all members took part with real data, so the result
        # may not be delivered yet. ``told`` is that knowledge: every member's host has said that it launched this
        # bucket. Since each rank launches in the schedule's order, everything that the same process set launched
        # earlier is valid too.
        if isinstance(deliver, Later):
            self._in_flight.add(launch, deliver)
            if deliver.told:
                for valid, valid_deliver in self._in_flight.through(launch):
                    self._settle(valid, valid_deliver)
            return
        if self._tensor_queue.frozen:
            self._held.append((launch, deliver))
            if self._failure.given:
                self.abandon()
        else:
            self._hand_over(launch, deliver)

    # --- buckets in flight on a device

    def _land(self) -> None:
        """Deliver the buckets that a device has completed.

        During a freeze, keep these buckets until the message Drain says which of them are valid.
        """
        try:
            for launch, deliver in self._in_flight.landed():
                self._settle(launch, deliver)
        except BaseException as error:  # a device plugin may raise anything, and this thread must survive
            self._explain(error)
        if self._failure.given:
            self.abandon()

    def _go_on(self, launch: Launch[Entry]) -> None:
        run = launch.position.resumable
        assert run is not None
        deliver = self._take_part(launch, partial(run.resume, launch))
        if deliver is not None:
            self._settle(launch, deliver)

    def _take_part(self, launch: Launch[Entry], run: Callable[[], Deliver | Later | None]) -> Deliver | Later | None:
        """Run a bucket by calling ``run``, and return the function that delivers the bucket's results.

        If ``run`` raises an error or the job has failed already, fail the bucket and return None, see ``_broke``.
        """
        if self._failure.given:
            self._failed(launch, None)
            return None
        try:
            return run()
        except BaseException as error:
            self._broke(launch, error)
            return None

    def _hand_over(self, launch: Launch[Entry], deliver: Deliver) -> None:
        assert launch.entries is not None
        try:
            outcomes = deliver()
        except BaseException as error:
            self._broke(launch, error)
            return
        self._meter.replayed += 1
        position = launch.position
        nbytes = position.nbytes if position.nbytes >= 0 else brought(launch.entries)
        self._meter.nbytes[position.planned.kind] += nbytes
        self._tensor_queue.delivered(launch)
        self._deliver(launch.entries, outcomes, -1)

    def _broke(self, launch: Launch[Entry], error: BaseException) -> None:
        """Fail the bucket ``launch``, whose run has raised ``error``. Unless ``error`` is Unserved, end the job, too."""
        if isinstance(error, Unserved):
            self._failed(launch, error)
        else:
            self._explain(error)
            self._failed(launch, None)

    def _failed(self, launch: Launch[Entry], error: BaseException | None) -> None:
        if launch.entries is not None:
            self._tensor_queue.delivered(launch)
            self.fail(launch.entries, error)

    def drain(self, message: Drain) -> None:
        """Run the buckets that other ranks have launched and this rank has not, before this rank leaves replay.

        Then deliver those kept buckets that are valid. The entries of the void buckets become pending again, so that
        they run later. This is called on the engine's thread.
        """
        begun_ns = now_ns()
        # First this rank enters, with dummy memory, everything that any rank has launched (``highest``), because the
        # peers are already waiting in those collectives. Only then it judges its own buckets. Those up to ``lowest``
        # were launched with real data by every member and are valid. In the others at least one rank took part with
        # dummy memory, so their entries become pending again.
        highest, lowest = dict(message.highest), dict(message.lowest)
        for launch in self._tensor_queue.drain(highest):
            self._take_part(launch, partial(self._run_replayed, launch, "dummy"))
        held, self._held = self._held + self._in_flight.all(), []
        for launch, deliver in held:
            if launch.place <= lowest[launch.planned.set_id]:
                self._hand_over(launch, deliver)
            else:
                self._meter.void += 1
                if isinstance(deliver, Staged):
                    deliver.void()
                if not self._tensor_queue.put_back(launch):
                    self.fail(launch.entries or (), None)
        self._meter.busy_ns += now_ns() - begun_ns
        valid = sum(launch.place <= lowest[launch.planned.set_id] for launch, _ in held)
        self._events.drained(message.epoch, begun_ns, valid, len(held) - valid)

    def abandon(self) -> None:
        """Fail all buckets that are kept until they are known to be valid.

        The job is over, so no message Drain will say which of these buckets are valid. This is called on the engine's
        thread.
        """
        held, self._held = self._held + self._in_flight.all(), []
        for launch, _ in held:
            self._failed(launch, None)

    # --- ends

    def _explain(self, error: BaseException) -> None:
        """Report ``error``, which was raised when a bucket ran, as the reason why the job ends.

        A transport fails most likely because a peer was lost, and the control network can report which peer. So first
        wait up to FAILURE_WAIT_S seconds for such a report. If the report arrives, it is the reason why the job ends,
        and ``error`` is not reported.
        """
        if isinstance(error, DdlInternalError) and self._failure.wait(FAILURE_WAIT_S):
            return
        if not isinstance(error, DdlInternalError):
            if not self._failure.given:  # the engine may meet the same fault again until its thread ends
                log.error("the engine failed", exc_info=error)
            wrapped = TransportError(f"the engine failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._broken(error)

    def _deliver(self, entries: Sequence[Entry | None], outcomes: Sequence[Outcome | None], index: int) -> None:
        self._landing.mixed = False
        after = self._after
        self._landing.complete(entries, outcomes, iter(entries), index, after)
        while after:
            after.popleft()()

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None, index: int = -1) -> None:
        """Fail the operations of ``entries`` with ``error``, or with the failure of the job if ``error`` is None."""
        with self._completion.lock:
            after = [self._fail(entry, error) for entry in entries]
        self._completion.announce()
        for then in filter(None, after):
            then()

    def _fail(self, entry: Entry | None, error: BaseException | None) -> Callable[[], None] | None:
        """Fail the operation of ``entry``, and return the function that must be called after it; see Handle.over."""
        if entry is None:
            return None
        during = called(entry.spec.kind, entry.name)
        entry.handle.fail(error if error is not None else self._failure.error(during))
        return entry.handle.over()


def _ran(todo: Launch[Entry] | tuple[Bucket, Sequence[Entry | None]]) -> tuple[Bucket | Planned, int]:
    """Return the arguments of the trace hooks for ``todo``: its bucket, and its place in the schedule.

    The place is -1 if the bucket does not belong to a schedule.
    """
    if isinstance(todo, Launch):
        return todo.bucket or todo.position.planned, todo.place
    return todo[0], -1
