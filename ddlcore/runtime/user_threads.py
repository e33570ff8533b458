"""Runs buckets on user threads that wait for an operation, which saves two switches between threads."""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ddlcore.errors import DdlInternalError
from ddlcore.reentry import reentrant
from ddlcore.runtime.agenda import Agenda
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.delivery import Deliver, void
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.landing import Landing
from ddlcore.runtime.launching_alone import LaunchingAlone, launch_alone, launch_unnamed
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.ranges import Ranges, title
from ddlcore.runtime.request import IDLE, Entry, PersistentMove, PersistentRequest, brought
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.submission import Submission
from ddlcore.runtime.tensor_queue import GONE, TensorQueue
from ddlcore.runtime.waiter import Until, Waited


class UserThreads:
    """The work of the engine that a waiting user thread does in its place.

    A signal handler (Ctrl-C) may interrupt the user thread between any two instructions. Then the engine continues the
    interrupted bucket. So a user thread runs only those buckets that the transport can enter in several tries. Only one
    thread runs buckets at a time, see ``TensorQueue.running``.
    """

    def __init__(
        self,
        tensor_queue: TensorQueue,
        completion: Completion,
        agenda: Agenda,
        landing: Landing,
        in_flight: DevicesInFlight,
        meter: Meter,
        ranges: Ranges | None,
        broke: Callable[[Launch[Entry], BaseException], None],
        go_on: Callable[[Launch[Entry]], None],
    ) -> None:
        """``broke`` fails a bucket whose run has raised an error, and ends the job if it must.

        ``go_on`` continues an interrupted bucket. The engine's thread will call it. If ``ranges`` is given, every
        bucket runs within a profiler range.
        """
        self._tensor_queue = tensor_queue
        self._completion = completion
        self._agenda = agenda
        self._landing = landing
        self._in_flight = in_flight
        self._meter = meter
        self._ranges = ranges
        self._broke = broke
        self._go_on = go_on
        self._events = tensor_queue.events
        self._submission = Submission(tensor_queue)
        self._run: Callable[[Launch[Entry], Waited], Deliver | None] = self._enter if ranges is None else self._show
        self.own_threads: set[int] = set()  # ids of ddl's own threads, none of which may wait for a bucket

    def inside(self) -> bool:
        """Return True if the calling thread must not wait for an operation now.

        That is the case on ddl's own threads, and on a user thread that is inside a call of ddl. On such a user thread,
        only a signal handler or a finalizer can call this method.
        """
        return get_ident() in self.own_threads or self.amid()

    def amid(self) -> bool:
        """Return whether the calling thread is inside a call of ddl: it holds a lock of ddl, or it runs a bucket.

        Unlike ``inside``, this method returns False on one of ddl's own threads that holds no lock. Such a thread calls
        user code only where that is safe, for example the function given to ``Handle.then``.
        """
        me = get_ident()
        held = self._tensor_queue.lock.held() or self._completion.lock.held()
        return held or (self._tensor_queue.running == me and me not in self.own_threads)

    def start_and_wait(self, entry: PersistentRequest, address: int, owner: object) -> None:
        """Do ``Submission.start_request`` and ``entry.wait()`` in one call, which is faster than the two calls.

        The tensor is at ``address``, and ``owner`` keeps its memory alive. Raises the errors of the two calls. The fast
        way is possible if the bucket of ``entry`` has no other entries and is the next bucket to launch. Then one
        locked section launches the bucket, one call of the transport runs it, and one locked section completes it. Few
        lines of code matter here: after a pause the CPU caches are cold, so every line takes about ten times as long.
        """
        ended = self._run_alone(launch_alone, entry, address, owner, entry)
        if ended is None:
            self._submission.start_request(entry, address, owner, True)
        if not ended:
            entry.wait()

    def run_unnamed(
        self, entry: PersistentRequest, address: int, owner: object, timeout_s: float | None = None
    ) -> bool:
        """Make a call without a name by ``entry``, and wait for its end, if it is the next bucket of the schedule.

        Return whether that is so; if not, nothing has happened. For ``address`` and ``owner`` see ``start_and_wait``.
        Raises the error of the operation, and DeadlineExceeded if it has not ended after ``timeout_s`` seconds; it goes
        on then.
        """
        since_s = time.monotonic()
        until = entry if timeout_s is None else Until(entry, since_s + timeout_s)
        try:
            ended = self._run_alone(launch_unnamed, entry, address, owner, until)
            if ended is False:
                entry.waiter.wait(entry, timeout_s, since_s)
                entry.wait()
        finally:
            if entry.user == get_ident():
                entry.user = 0
        return ended is not None

    def _run_alone(
        self, launching: LaunchingAlone, entry: PersistentRequest, address: int, owner: object, until: Waited
    ) -> bool | None:
        """Launch the bucket of ``entry`` by ``launching``, and run it while ``until`` is pending.

        Return whether ``entry`` has ended; None if nothing could be launched.
        """
        me = get_ident()
        tensor_queue = self._tensor_queue
        if tensor_queue.running == me or me in self.own_threads or tensor_queue.lock.held():
            raise reentrant("an allreduce")
        begun_ns = now_ns()
        try:
            with tensor_queue.lock:
                if tensor_queue.running or self._agenda.todo:
                    return None
                launch = launching(tensor_queue, me, entry, address, owner, begun_ns)
            if launch is None:
                return None
            if self._events.on:
                self._events.submitted((entry,), True)
            deliver = self._run(launch, until)
            if deliver is not None and self._land(launch, deliver, begun_ns, True):
                return True
            self._let_go()
        except BaseException:
            if tensor_queue.running == me:
                tensor_queue.running = GONE  # first: so it is set even if a second interrupt follows
            self._called_away()
            raise
        return False

    def progress(self, operation: Waited) -> None:
        """Run ready buckets on the calling user thread, which is about to wait for ``operation``.

        If the engine runs a bucket or has items in its queue, no bucket is run here. Raises ReentrantCall if the
        calling thread would wait for itself.
        """
        if not operation.pending:
            return
        if self.inside():
            raise reentrant("a wait")
        me = get_ident()
        tensor_queue = self._tensor_queue
        goes_on = True
        try:
            # ``try`` must cover the backward jump of this loop (see reentry.Lock). So the jump must not be conditional: the
            # loop tests its condition at the beginning, and ends with an assignment.
            while True:
                if not (goes_on and operation.pending):
                    break
                with tensor_queue.lock:
                    if tensor_queue.behind:
                        tensor_queue.catch_up()
                    if self._agenda.todo or tensor_queue.running not in (0, me):
                        break
                    launch = tensor_queue.launch(me)
                    if launch is None:
                        break
                begun_ns = now_ns()
                deliver = self._run(launch, operation)
                goes_on = deliver is not None and self._land(launch, deliver, begun_ns)
            self._let_go()
        except BaseException:
            if tensor_queue.running == me:
                tensor_queue.running = GONE  # first: so it is set even if a second interrupt follows
            self._called_away()
            raise

    def wake_for_device(self) -> None:
        """Wake the engine, because a thread waits for an operation on a device. Any thread may call this."""
        if self._in_flight:
            with self._tensor_queue.lock:
                self._tensor_queue.work.notify()

    def _enter(self, launch: Launch[Entry], operation: Waited) -> Deliver | None:
        """Run a launched bucket on a user thread that waits for ``operation``. Return the bucket's deliver function.

        Return None if the bucket is void, if running it failed, or if ``operation`` ended before the bucket could be
        entered. In the last case the bucket may still have to be run.
        """
        run = launch.position.resumable
        assert run is not None
        try:
            deliver = run.resume(launch, operation)
            return deliver if deliver is not void else None
        except DdlInternalError as error:
            self._broke(launch, error)
            self._tensor_queue.own = None
            return None

    def _show(self, launch: Launch[Entry], operation: Waited) -> Deliver | None:
        """Do what ``_enter`` does, within a profiler range that has the bucket's name."""
        assert self._ranges is not None
        with self._ranges(title(launch.planned)):
            return self._enter(launch, operation)

    def _land(self, launch: Launch[Entry], deliver: Deliver, begun_ns: int, ends: bool = False) -> bool:
        """Deliver a bucket that the calling user thread has run, and return True. ``deliver`` returns its outcomes.

        If this rank is frozen, do not deliver the bucket, and return False: the coordinator must first decide whether
        the bucket is valid, and then the engine delivers it. ``begun_ns`` is the time at which the bucket began.
        ``ends`` says that the calling thread runs no further bucket.
        """
        entries = launch.entries
        assert entries is not None
        alone: Any = entries[0] if len(entries) == 1 else None
        given: Any = None  # what a persistent move gets its outcome in
        if alone.__class__ is PersistentMove:
            given = alone.source.owner
        elif alone.__class__ is not PersistentRequest:
            alone = None
        tensor_queue, position, meter, landing = self._tensor_queue, launch.position, self._meter, self._landing
        kind, nbytes = position.planned.kind, position.nbytes
        rest: Iterator[Entry] | None = iter(entries) if alone is None else None
        outcomes: Sequence[Outcome | None] = ()
        if alone is None or given is not None:
            outcomes = deliver()
            if nbytes < 0:
                nbytes = brought(entries) if given is None else given.source.nbytes
        with tensor_queue.lock:
            took_ns = now_ns() - begun_ns
            if tensor_queue.frozen:
                return False
            # Since ``frozen`` was read nothing is called until ``own`` is cleared, so nothing can interrupt.
            meter.replayed += 1
            meter.nbytes[kind] += nbytes
            meter.busy_ns += took_ns
            meter.idle_ns -= took_ns  # the engine's thread has counted this time as idle
            if rest is None:  # complete the request here, which is faster for a single tensor
                del tensor_queue.launches[launch.number]
                if given is not None:
                    given.outcome = outcomes[0]
                    given.done = True
                alone.index = -1
                alone.source.owner = None
                alone.state = IDLE
            else:
                landing.rest = rest
                landing.outcomes = outcomes
                landing.mixed = False
                landing.launch = launch
            tensor_queue.own = None
            if ends:
                tensor_queue.running = 0
                meter.alone_ns += took_ns  # this thread's ``Waiter.waited_s`` does not count it
                if self._agenda.todo or self._agenda.stopped or tensor_queue.is_ready():
                    tensor_queue.work.notify()
        if rest is not None:
            tensor_queue.delivered(launch)
            landing.complete(entries, outcomes, rest, -1, self._agenda.todo)
            landing.outcomes = ()
            assert position.resumable is not None
            position.resumable.forget()
        elif self._completion.waiting:
            self._completion.announce()
        if given is not None and position.resumable is not None:
            position.resumable.forget()
        if self._events.on:
            self._events.completed(launch.bucket or position.planned, launch.place, begun_ns, begun_ns + took_ns)
            if ends:
                self._events.waited(begun_ns, begun_ns + took_ns)
        return True

    def _let_go(self) -> None:
        """Give the work back to the engine, because the calling user thread stops running buckets.

        If the thread has launched a bucket and not finished it, the engine continues with this bucket.
        """
        tensor_queue, agenda = self._tensor_queue, self._agenda
        with tensor_queue.lock:
            if tensor_queue.running == get_ident():
                self.hand_back()
            if not tensor_queue.running and (agenda.todo or agenda.stopped or tensor_queue.is_ready()):
                tensor_queue.work.notify()

    def hand_back(self) -> None:
        """Put the bucket that a user thread has begun and not finished, if there is one, into the engine's queue.

        The caller holds the lock of the tensor queue.
        """
        todo: Callable[[], None] | None = None
        if self._landing.launch is not None:
            todo = partial(self._landing.finish, self._agenda.todo)
        elif self._tensor_queue.own is not None:
            todo = partial(self._go_on, self._tensor_queue.own)
        self._tensor_queue.own = None  # only the last line from here on is a call
        self._tensor_queue.running = 0
        if todo is not None:
            self._agenda.todo.appendleft(todo)

    def _called_away(self) -> None:
        """Wake the engine, because an exception (for example from a signal handler) interrupted the calling thread.

        The engine continues the work of that thread. If this method itself is interrupted too, the control thread
        notices that within a second and wakes the engine.
        """
        with self._tensor_queue.lock:
            self._tensor_queue.work.notify()
