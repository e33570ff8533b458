"""The engine thread: runs a rank's buckets one after the other, in the order in which they were decided."""

from __future__ import annotations

import logging
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.messages.to_coordinator import Frozen
from ddlcore.messages.to_rank import Bucket, Drain, Planned, Resume
from ddlcore.runtime.checks import called
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.dispatch import Dispatcher
from ddlcore.runtime.executor import Deliver, Later, Staged, Unserved
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.ranges import Ranges, title
from ddlcore.runtime.reentry import reentrant
from ddlcore.runtime.request import IDLE, Entry, PersistentRequest, Todo
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.tensor_queue import GONE, TensorQueue
from ddlcore.runtime.waiter import SLICE_S, Waited
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
        dispatcher: Dispatcher,
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
        self._execute, self._run_replayed = dispatcher.execute, dispatcher.replay
        self._run_bucket_here = self._enter
        self._meter = meter
        self._sets = sets
        self._tensor_queue = tensor_queue
        self._completion = completion
        self._failure = failure
        self._broken = broken
        # These three say how far a waiting user thread had delivered its bucket when a signal handler interrupted it,
        # see ``TensorQueue.running``.
        self._landing: Launch[Entry] | None = None  # complete and valid, but not delivered yet
        self._rest: Iterator[Entry] = iter(())  # its entries that are still to be delivered
        self._mixed = False  # some of its entries belong to handles
        self.threads: set[int] = set()  # ids of ddl's own threads, none of which may wait for a bucket
        self._stopped = False
        self._closing = False  # the engine has ended, and only devices still work
        self.bucket: Bucket | None = None  # the negotiated bucket that runs now, for the stall check
        self._events = tensor_queue.events
        self._queue: deque[Todo] = deque()
        self._after: deque[Callable[[], None]] = deque()  # functions of callers, to be called when no lock is held
        self._held: list[tuple[Launch[Entry], Deliver]] = []
        self.in_flight = in_flight
        self._since_ns = 0  # when the last bucket, or the last wait for a bucket, ended
        self._me = -2  # the id of the engine's thread
        self._thread = OwnThread(target=self._loop, name=name)
        if ranges is not None:
            self._show(ranges)

    def start(self) -> None:
        self._thread.start()

    def _show(self, ranges: Ranges) -> None:
        execute, replay, enter = self._execute, self._run_replayed, self._run_bucket_here

        def execute_shown(bucket: Bucket, entries: Sequence[Entry | None]) -> list[Outcome | None]:
            with ranges(title(bucket)):
                return execute(bucket, entries)

        def replay_shown(launch: Launch[Entry], use: str) -> Deliver | Later:
            with ranges(title(launch.bucket or launch.planned)):
                return replay(launch, use)

        def enter_shown(launch: Launch[Entry], operation: Waited) -> Deliver | None:
            with ranges(title(launch.planned)):
                return enter(launch, operation)

        self._execute, self._run_replayed, self._run_bucket_here = execute_shown, replay_shown, enter_shown

    def post(self, item: Todo) -> None:
        """Append ``item`` to the engine's queue. Any thread may call this.

        ``item`` is a bucket with its entries, or a function that the engine's thread will call.
        """
        with self._tensor_queue.lock:
            self._queue.append(item)
            self._tensor_queue.work.notify()

    def inside(self) -> bool:
        """Return True if the calling thread must not wait for an operation now.

        That is the case on ddl's own threads, and on a user thread that is inside a call of ddl. On such a user thread,
        only a signal handler or a finalizer can call this method.
        """
        return get_ident() in self.threads or self.amid()

    def amid(self) -> bool:
        """Return whether the calling thread is inside a call of ddl: it holds a lock of ddl, or it runs a bucket.

        Unlike ``inside``, this method returns False on one of ddl's own threads that holds no lock. Such a thread calls
        user code only where that is safe, for example the function given to ``Handle.then``.
        """
        me = get_ident()
        held = self._tensor_queue.lock.held() or self._completion.lock.held()
        return held or (self._tensor_queue.running == me and me not in self.threads)

    def stop(self, timeout_s: float) -> bool:
        """End the engine after all items in its queue have run, and close the communicators.

        Return whether the engine has ended within the time limits. The items in the queue have ``timeout_s`` seconds.
        After that, work that is still queued on devices has CLOSE_S + CLOSED_S seconds more, but only as long as the
        job has not failed.
        """
        with self._tensor_queue.lock:
            self._stopped = True
            self._tensor_queue.work.notify()
        self._thread.join(timeout_s)
        until_s = time.monotonic() + CLOSE_S + CLOSED_S
        while self._closing and self._thread.is_alive() and not self._failure.given and time.monotonic() < until_s:
            self._thread.join(SLICE_S)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        meter = self._meter
        self._me = get_ident()
        self.threads.add(self._me)
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
        """Wait for the next item that the engine must run, and return it. Return None if the engine has to end.

        If the schedule cannot continue during this wait, ask the coordinator to end the replay.
        """
        slept = False
        with self._tensor_queue.work:
            if self._tensor_queue.running == self._me:
                self._tensor_queue.running = 0
            while True:
                # Only one thread may run buckets at a time, and ``running`` says which. Both this thread and a waiting
                # user thread take an item and set ``running`` under the same lock. If the item were taken first and
                # ``running`` set later, the other thread could launch the next bucket before this one, and two ranks
                # would enter their collectives in different orders.
                if self._tensor_queue.running == GONE:
                    self._take_over()
                if not self._tensor_queue.running:
                    todo = self._queue.popleft() if self._queue else self._tensor_queue.launch()
                    if todo is None and self.in_flight.is_due(slept, self._stopped):
                        todo = _LAND
                    if todo is not None or self._stopped:
                        self._tensor_queue.running = self._me
                        return todo
                if self._tensor_queue.conflict:
                    self._tensor_queue.leave(self._tensor_queue.stopped_waiting())
                idle_ns = now_ns()
                slept = not self._tensor_queue.work.wait(self.in_flight.look_s())
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
                self._tensor_queue.forget(bucket.result)
            elif bucket.kind is Kind.JOIN:
                self._tensor_queue.next_generation()
            self._meter.negotiated += 1
            self._meter.nbytes[bucket.kind] += _brought(entries)
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
            self.in_flight.add(launch, deliver)
            if deliver.told:
                for valid, valid_deliver in self.in_flight.through(launch):
                    self._settle(valid, valid_deliver)
            return
        if self._tensor_queue.frozen:
            self._held.append((launch, deliver))
            if self._failure.given:
                self.abandon()
        else:
            self._hand_over(launch, deliver)

    # --- buckets in flight on a device

    def wake_for_device(self) -> None:
        """Wake the engine, because a thread waits for an operation on a device. Any thread may call this."""
        if self.in_flight:
            with self._tensor_queue.lock:
                self._tensor_queue.work.notify()

    def _land(self) -> None:
        """Deliver the buckets that a device has completed.

        During a freeze, keep these buckets until the message Drain says which of them are valid.
        """
        try:
            for launch, deliver in self.in_flight.landed():
                self._settle(launch, deliver)
        except BaseException as error:  # a device plugin may raise anything, and this thread must survive
            self._explain(error)
        if self._failure.given:
            self.abandon()

    def start_and_wait(self, entry: PersistentRequest, address: int, owner: object) -> None:
        """Do ``TensorQueue.start_request`` and ``entry.wait()`` in one call, which is faster than the two calls.

        The tensor is at ``address``, and ``owner`` keeps its memory alive. Raises the errors of the two calls. The fast
        way is possible if the bucket of ``entry`` has no other entries and is the next bucket to launch. Then one
        locked section launches the bucket, one call of the transport runs it, and one locked section completes it. Few
        lines of code matter here: after a pause the CPU caches are cold, so every line takes about ten times as long.
        """
        me = get_ident()
        tensor_queue = self._tensor_queue
        if self._tensor_queue.running == me or me in self.threads or tensor_queue.lock.held():
            raise reentrant("an allreduce")
        if self._events.on:
            self._events.submitted((entry,), True)
        begun_ns = now_ns()
        try:
            with tensor_queue.lock:
                if tensor_queue.behind:
                    tensor_queue.catch_up()
                launch = None
                if not tensor_queue.running and not self._queue:
                    launch = tensor_queue.launch(me, entry, address, owner, begun_ns)
            if launch is None:
                tensor_queue.start_request(entry, address, owner, True)
            else:
                deliver = self._run_bucket_here(launch, entry)
                if deliver is launch.position.run.done and self._land_here(launch, begun_ns, True):
                    return
                self._let_go()
        except BaseException:
            if tensor_queue.running == me:
                tensor_queue.running = GONE  # first: so it is set even if a second interrupt follows
            self._called_away()
            raise
        entry.wait()

    def progress(self, operation: Waited) -> None:
        """Run ready buckets on the calling user thread, which is about to wait for ``operation``.

        This saves two thread switches. If the engine runs a bucket or has items in its queue, no bucket is run here. A
        signal handler (Ctrl-C) may interrupt this thread between any two instructions; the engine then continues the
        interrupted bucket. So this method runs only those buckets that the transport can enter in several tries. Raises
        ReentrantCall if the calling thread would wait for itself.
        """
        if not operation.pending:
            return
        if self.inside():
            raise reentrant("a wait")
        me = get_ident()
        tensor_queue = self._tensor_queue
        try:
            while operation.pending:
                with tensor_queue.lock:
                    if tensor_queue.behind:
                        tensor_queue.catch_up()
                    if self._queue or tensor_queue.running not in (0, me):
                        break
                    launch = tensor_queue.launch(me)
                    if launch is None:
                        break
                begun_ns = now_ns()
                deliver = self._run_bucket_here(launch, operation)
                # None: what this thread waited for is over. Any other value than ``done`` means that the bucket is
                # void.
                if deliver is not launch.position.run.done or not self._land_here(launch, begun_ns):
                    break
            self._let_go()
        except BaseException:
            if tensor_queue.running == me:
                tensor_queue.running = GONE  # first: so it is set even if a second interrupt follows
            self._called_away()
            raise

    def _enter(self, launch: Launch[Entry], operation: Waited) -> Deliver | None:
        """Run a launched bucket on a user thread that waits for ``operation``. Return the bucket's deliver function.

        Return None if running the bucket failed, or if ``operation`` ended before the bucket could be entered. In the
        second case the bucket may still have to be run.
        """
        try:
            deliver: Deliver | None = launch.position.run.resume(launch, operation)
        except DdlInternalError as error:
            self._explain(error)
            self._failed(launch, None)
            self._tensor_queue.own = None
            return None
        return deliver

    def _land_here(self, launch: Launch[Entry], begun_ns: int, ends: bool = False) -> bool:
        """Deliver a bucket that the calling user thread has run, and return True.

        If this rank is frozen, do not deliver the bucket, and return False: the coordinator must first decide whether
        the bucket is valid, and then the engine delivers it. ``begun_ns`` is the time at which the bucket began.
        ``ends`` says that the calling thread runs no further bucket.
        """
        entries = launch.entries
        assert entries is not None
        alone: Any = entries[0] if len(entries) == 1 and entries[0].__class__ is PersistentRequest else None
        rest = iter(entries) if alone is None else None
        tensor_queue, position, meter = self._tensor_queue, launch.position, self._meter
        kind = position.planned.kind
        with tensor_queue.lock:
            took_ns = now_ns() - begun_ns
            if tensor_queue.frozen:
                return False
            # Since ``frozen`` was read nothing is called until ``own`` is cleared, so nothing can interrupt.
            meter.replayed += 1
            meter.nbytes[kind] += position.nbytes
            meter.busy_ns += took_ns
            meter.idle_ns -= took_ns  # the engine's thread has counted this time as idle
            if rest is None:  # complete the request here, which is faster for a single tensor
                del tensor_queue.launches[launch.number]
                alone.index = -1
                alone.source.owner = None
                alone.state = IDLE
            else:
                self._rest = rest
                self._mixed = False
                self._landing = launch
            tensor_queue.own = None
            if ends:
                tensor_queue.running = 0
                meter.alone_ns += took_ns  # this thread's ``Waiter.waited_s`` does not count it
                if self._queue or self._stopped or tensor_queue.is_ready():
                    tensor_queue.work.notify()
        if rest is not None:
            tensor_queue.delivered(launch)
            self._complete(entries, repeat(None), rest, -1, self._queue)
        elif self._completion.waiting:
            self._completion.announce()
        if self._events.on:
            self._events.completed(*_ran(launch), begun_ns, begun_ns + took_ns)
            if ends:
                self._events.waited(begun_ns, begun_ns + took_ns)
        return True

    def _finish_landing(self) -> None:
        """Deliver the remaining entries of the bucket ``_landing``, whose delivery on a user thread was interrupted."""
        launch = self._landing
        assert launch is not None and launch.entries is not None
        self._tensor_queue.delivered(launch)
        self._complete(launch.entries, repeat(None), self._rest, -1, self._queue)

    def _complete(
        self,
        entries: Sequence[Entry | None],
        outcomes: Iterable[Outcome | None],
        rest: Iterator[Entry | None],
        index: int,
        after: deque[Any],
    ) -> None:
        """Complete those entries of a bucket that ``rest`` still yields, and wake the threads that wait for them.

        ``entries`` and ``outcomes`` are those of the whole bucket. ``index`` is the bucket's index at the coordinator,
        or -1 in replay. Functions that were given to ``Handle.then`` are appended to ``after``. Each entry is completed
        by a sequence of plain stores, or by a call whose repetition has no effect. So this method may be interrupted at
        any point and then called again with the same ``rest``.
        """
        with self._completion.lock:
            # All entries change before ``announce`` wakes the waiters: a waiter that is woken first would see its
            # operation still pending, and would sleep again until its time slice ends.
            for entry in rest:
                if entry.__class__ is PersistentRequest:  # type() is a call, after which a handler may raise
                    entry.index = index
                    entry.source.owner = None
                    entry.state = IDLE
                elif entry is not None:
                    self._mixed = True
            if self._mixed:
                for entry, outcome in zip(entries, outcomes):
                    if entry is not None and entry.__class__ is not PersistentRequest:
                        entry.handle.complete(entry.number, outcome, index)
                        entry.handle.pass_on(after)
            self._landing = None
        self._completion.announce()

    def _let_go(self) -> None:
        """Give the work back to the engine, because the calling user thread stops running buckets.

        If the thread has launched a bucket and not finished it, the engine continues with this bucket.
        """
        with self._tensor_queue.lock:
            if self._tensor_queue.running == get_ident():
                self._take_over()
            if not self._tensor_queue.running and (self._queue or self._stopped or self._tensor_queue.is_ready()):
                self._tensor_queue.work.notify()

    def _take_over(self) -> None:
        """Put the bucket that a user thread has begun and not finished, if there is one, into the engine's queue.

        The caller holds the lock of the tensor queue.
        """
        todo: Callable[[], None] | None = None
        if self._landing is not None:
            todo = self._finish_landing
        elif self._tensor_queue.own is not None:
            todo = partial(self._go_on, self._tensor_queue.own)
        self._tensor_queue.own = None  # only the last line from here on is a call
        self._tensor_queue.running = 0
        if todo is not None:
            self._queue.appendleft(todo)

    def _called_away(self) -> None:
        """Wake the engine, because an exception (for example from a signal handler) interrupted the calling thread.

        The engine continues the work of that thread. If this method itself is interrupted too, the control thread
        notices that within a second and wakes the engine.
        """
        with self._tensor_queue.lock:
            self._tensor_queue.work.notify()

    def _go_on(self, launch: Launch[Entry]) -> None:
        deliver = self._take_part(launch, partial(launch.position.run.resume, launch))
        if deliver is not None:
            self._settle(launch, deliver)

    def _take_part(self, launch: Launch[Entry], run: Callable[[], Deliver | Later]) -> Deliver | Later | None:
        """Run a bucket by calling ``run``, and return the function that delivers the bucket's results.

        If ``run`` raises an error or the job has failed already, fail the bucket and return None. An error other than
        Unserved also ends the job.
        """
        if self._failure.given:
            self._failed(launch, None)
            return None
        try:
            return run()
        except Unserved as error:
            self._failed(launch, error)
            return None
        except BaseException as error:
            self._explain(error)
            self._failed(launch, None)
            return None

    def _hand_over(self, launch: Launch[Entry], deliver: Deliver) -> None:
        assert launch.entries is not None
        try:
            outcomes = deliver()
        except BaseException as error:
            self._explain(error)
            self._failed(launch, None)
            return
        self._meter.replayed += 1
        position = launch.position
        if position.planned.kind.is_ragged:  # of another size in each step
            self._meter.nbytes[position.planned.kind] += _brought(launch.entries)
        else:
            self._meter.nbytes[position.planned.kind] += position.nbytes
        self._tensor_queue.delivered(launch)
        self._deliver(launch.entries, outcomes, -1)

    def _failed(self, launch: Launch[Entry], error: BaseException | None) -> None:
        if launch.entries is not None:
            self._tensor_queue.delivered(launch)
            self.fail(launch.entries, error)

    def drain(self, message: Drain) -> None:
        """Run the buckets that other ranks have launched and this rank has not, before this rank leaves replay.

        Then deliver those kept buckets that are valid. The entries of the void buckets become pending again, so that
        they run later. This is called on the engine's thread.
        """
        if self._failure.given:
            return  # ``abandon`` ends the held buckets
        begun_ns = now_ns()
        # First this rank enters, with dummy memory, everything that any rank has launched (``highest``), because the
        # peers are already waiting in those collectives. Only then it judges its own buckets. Those up to ``lowest``
        # were launched with real data by every member and are valid. In the others at least one rank took part with
        # dummy memory, so their entries become pending again.
        highest, lowest = dict(message.highest), dict(message.lowest)
        for launch in self._tensor_queue.drain(highest):
            self._take_part(launch, partial(self._run_replayed, launch, "dummy"))
        held, self._held = self._held + self.in_flight.all(), []
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
        if not any(isinstance(item, Resume) for item in message.items):
            self._tensor_queue.discover(message.epoch + 1)
            self._events.left(message.epoch + 1)

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> Frozen | None:
        """Begin to replay the schedule that ``message`` names. Return the answer to a freeze that came too early, if any.

        ``sets`` contains the ranks of each process set, and ``rank`` is this rank. This is called on the engine's
        thread, after all buckets that were decided before ``message`` have run.
        """
        buckets = self._tensor_queue.planned(message.schedule)
        self._events.resumed(message.epoch, message.schedule, buckets, message.start)
        return self._tensor_queue.resume(message, sets, rank)

    def abandon(self) -> None:
        """Fail all buckets that are kept until they are known to be valid.

        The job is over, so no message Drain will say which of these buckets are valid. This is called on the engine's
        thread.
        """
        held, self._held = self._held + self.in_flight.all(), []
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
        self._mixed = False
        after = self._after
        self._complete(entries, outcomes, iter(entries), index, after)
        while after:
            after.popleft()()

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None, index: int = -1) -> None:
        """Fail the operations of ``entries`` with ``error``, or with the failure of the job if ``error`` is None."""
        after: list[Callable[[], None]] = []
        with self._completion.lock:
            for entry in entries:
                if entry is not None:
                    during = called(entry.spec.kind, entry.name)
                    entry.handle.fail(error if error is not None else self._failure.error(during))
                    then = entry.handle.over()
                    if then is not None:
                        after.append(then)
        self._completion.announce()
        for then in after:
            then()


def _ran(todo: Launch[Entry] | tuple[Bucket, Sequence[Entry | None]]) -> tuple[Bucket | Planned, int]:
    """Return the arguments of the trace hooks for ``todo``: its bucket, and its place in the schedule.

    The place is -1 if the bucket does not belong to a schedule.
    """
    if isinstance(todo, Launch):
        return todo.bucket or todo.position.planned, todo.place
    return todo[0], -1


def _brought(entries: Sequence[Entry | None]) -> int:
    """Return the size in bytes of this rank's tensors in a bucket.

    An entry that is None counts as 0: this rank has not submitted that tensor.
    """
    return sum(entry.spec.nbytes(entry.rows) for entry in entries if entry is not None)
