"""The engine thread: runs a rank's buckets one after the other, in the order in which they were decided."""

from __future__ import annotations

import logging
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ddlcore.errors import DdlInternalError, TransportError
from ddlcore.messages import Bucket, Drain, Frozen, Leave, Planned, Resume
from ddlcore.observe.trace_hooks import TraceHooks
from ddlcore.runtime.checks import called
from ddlcore.runtime.executor import Deliver, Executor, Later, Staged, Unserved
from ddlcore.runtime.handle import SLICE_S, Completion, Waited
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.meter import Meter, now_ns
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.ranges import Ranges, title
from ddlcore.runtime.reentry import reentrant
from ddlcore.runtime.request import IDLE, Entry, Outcome, PersistentRequest
from ddlcore.runtime.schedule import Launch
from ddlcore.runtime.tensor_queue import GONE, TensorQueue
from ddlcore.types import Kind

__all__ = ["Engine", "Todo"]

log = logging.getLogger("ddl")
CLOSE_S = 60.0  # for what a device has under way when the job ends: those of the peers may need it
CLOSED_S = 10.0  # for the communicators, behind that
FAILURE_WAIT_S = 2.0  # how long a failed transport waits to hear that a peer died: the better explanation


Todo = tuple[Bucket, list[Entry | None]] | Callable[[], None]


def _LAND() -> None:
    """Stands for Engine._land among what there is to do."""


class Engine:
    """Owns the communicators and the executor. ``broken`` is told when the data path fails by itself.

    What was decided (``post``) comes first, in order; then the schedule that is replayed gives what is
    ready. ``say`` reaches the coordinator.
    """

    def __init__(
        self,
        executor: Executor,
        sets: ProcessSets,
        tensor_queue: TensorQueue,
        completion: Completion,
        failure: JobFailure,
        broken: Callable[[BaseException], None],
        meter: Meter,
        name: str,
    ) -> None:
        self._executor = executor
        self._execute, self._run_replayed, self._run_bucket_here = executor.execute, executor.replay, self._enter
        self._meter = meter
        self._sets = sets
        self._tensor_queue = tensor_queue
        self._completion = completion
        self._failure = failure
        self._broken = broken
        # Where a waiting user thread was when a signal handler called it away, see ``TensorQueue.running``:
        self._landing: Launch[Entry] | None = None  # complete and valid, and to be handed over
        self._rest: Iterator[Entry] = iter(())  # of its entries, those to come
        self._mixed = False  # some of them are of handles
        self.threads: set[int] = set()  # of ddl's own: none may wait for a bucket
        self._stopped = False
        self._closing = False  # nothing is left but what devices do
        self.bucket: Bucket | None = None  # the decided bucket that runs, for whoever watches over it
        tensor_queue.leave = self.leave
        completion.progress = self.progress
        completion.wake = self._wake_for_device
        self.say: Callable[[Leave | Frozen], None] = lambda message: None
        self.trace_hooks: TraceHooks | None = None  # while a timeline is written
        self._queue: deque[Todo] = deque()
        self._held: list[tuple[Launch[Entry], Deliver]] = []
        self.in_flight = DevicesInFlight(completion, meter)
        self._since_ns = 0  # when the last bucket ended, or the last wait for one
        self._me = -2  # the engine's thread
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, ranges: Ranges) -> None:
        """Has every bucket run within a range by its name. Before ``start``."""
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
        """Adds a bucket, or a call to be made on this thread, behind what is there."""
        with self._tensor_queue.lock:
            self._queue.append(item)
            self._tensor_queue.work.notify()

    def inside(self) -> bool:
        """Whether the calling thread is one of ddl's own, or in the middle of something of ddl's.

        Of a user's thread, True only where a signal handler or a finalizer asks: it must not wait here for anything.
        """
        return get_ident() in self.threads or self.amid()

    def amid(self) -> bool:
        """The same, but for what one of ddl's own calls at a moment that is fit for it, such as ``Handle.then``'s call."""
        me = get_ident()
        held = self._tensor_queue.lock.held() or self._completion.lock.held()
        return held or (self._tensor_queue.running == me and me not in self.threads)

    def stop(self, timeout_s: float) -> bool:
        """Ends after what is queued, and closes the communicators. False if that took too long.

        ``timeout_s`` is for what hosts do; devices that have more to do are given more time, as long as the job stands.
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
            todo = None  # what was done last, and its tensors, must not live until there is more to do
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
            if (hooks := self.trace_hooks) is not None:  # read once: another thread may end it at any moment
                hooks.bucket(*_ran(todo), self._since_ns, ended_ns)
            self._since_ns = ended_ns
        self._closing = True
        self._sets.close(CLOSE_S)

    def _next(self) -> Todo | Launch[Entry] | None:
        """Waits for what comes next; asks to leave when the schedule has been waited for too long."""
        slept = False
        with self._tensor_queue.work:
            if self._tensor_queue.running == self._me:
                self._tensor_queue.running = 0
            while True:
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
                    self.leave(self._tensor_queue.stopped_waiting())
                idle_ns = now_ns()
                slept = not self._tensor_queue.work.wait(self.in_flight.look_s())
                self._since_ns = now_ns()
                self._meter.idle_ns += self._since_ns - idle_ns

    def leave(self, epoch: int, slow: bool = False) -> None:
        """Asks to leave replay; from any thread. ``slow``: it may be that a rank just takes its time."""
        self._meter.divergences += 1
        self._tensor_queue.flight.note("leave", epoch=epoch, slow=slow)
        self.say(Leave(epoch, "a bucket waits for tensors that do not come", slow))

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
        """Runs a bucket with this rank's data."""
        deliver = self._take_part(launch, partial(self._run_replayed, launch, "fusion"))
        if deliver is not None:
            self._settle(launch, deliver)

    def _settle(self, launch: Launch[Entry], deliver: Deliver | Later) -> None:
        """A bucket is complete: it is handed over at once while nothing is frozen, else after Drain."""
        if isinstance(deliver, Later):
            self.in_flight.add(launch, deliver)
            if deliver.told:
                for valid, valid_deliver in self.in_flight.through(launch):
                    self._settle(valid, valid_deliver)
            return
        with self._tensor_queue.lock:
            frozen = self._tensor_queue.frozen
        if frozen:
            self._held.append((launch, deliver))
            if self._failure.given:
                self.abandon()
        else:
            self._hand_over(launch, deliver)

    # --- what a device has under way

    def _wake_for_device(self) -> None:
        """Somebody waits for what is on a device; any thread."""
        if self.in_flight:
            with self._tensor_queue.lock:
                self._tensor_queue.work.notify()

    def _land(self) -> None:
        """Hands over what a device has done, where that alone tells that it is valid."""
        try:
            for launch, deliver in self.in_flight.landed():
                self._settle(launch, deliver)
        except BaseException as error:  # a device of somebody's own may raise anything, and this thread must live
            self._explain(error)
        if self._failure.given:
            self.abandon()

    def start_and_wait(self, entry: PersistentRequest, address: int, owner: object) -> None:
        """``TensorQueue.start_request`` and ``entry.wait()`` in one, for a user's thread that does nothing in between.

        Where the entry is a bucket by itself and it is its turn, three things happen: one section of the
        lock to launch it, one call of the transport, one section to end it. After a pause every line counts
        ten times: the caches are cold. Raises as they do.
        """
        me = get_ident()
        tensor_queue = self._tensor_queue
        if self._tensor_queue.running == me or me in self.threads or tensor_queue.lock.held():
            raise reentrant("an allreduce")
        begun_ns = now_ns()
        try:
            with tensor_queue.lock:
                if tensor_queue.behind:
                    tensor_queue.catch_up()
                launch = None
                if not self._tensor_queue.running and not self._queue:
                    launch = tensor_queue.launch_alone(entry, address, owner, begun_ns, me)
                    if tensor_queue.behind:
                        tensor_queue.catch_up()
            if launch is None:
                tensor_queue.start_request(entry, address, owner, True)
            else:
                deliver = self._run_bucket_here(launch, entry)
                if deliver is launch.position.run.done:
                    with tensor_queue.lock:
                        took_ns = now_ns() - begun_ns
                        if tensor_queue.land_alone(launch, entry, self._meter, took_ns):
                            if (hooks := self.trace_hooks) is not None:
                                hooks.bucket(*_ran(launch), begun_ns, begun_ns + took_ns)
                                hooks.waited(begun_ns, begun_ns + took_ns)
                            if self._queue or self._stopped or tensor_queue.is_ready():
                                tensor_queue.work.notify()
                            return
                self._let_go()
        except BaseException:
            if tensor_queue.running == me:
                tensor_queue.running = GONE  # before all else: who is interrupted here, too, has said so
            self._called_away()
            raise
        entry.wait()

    def progress(self, operation: Waited) -> None:
        """For a user's thread that is about to wait: it runs what is ready itself, where the engine is idle.

        That spares two changes of thread. Only buckets that can be entered in tries: a signal's handler may
        call this thread away (Ctrl-C) between any two instructions, and then the engine goes on from there.
        Raises ReentrantCall for a thread that would wait for itself.
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
                    if (
                        self._queue
                        or tensor_queue.running not in (0, me)
                        or not getattr(tensor_queue.next_run(), "resumable", False)
                    ):
                        break
                    launch = tensor_queue.advance(me)
                    assert launch is not None
                    if tensor_queue.behind:
                        tensor_queue.catch_up()
                begun_ns = now_ns()
                deliver = self._run_bucket_here(launch, operation)
                # None: what this thread waited for is over. Another than ``done``: it is void.
                if deliver is not launch.position.run.done or not self._land_here(launch, begun_ns):
                    break
            self._let_go()
        except BaseException:
            if tensor_queue.running == me:
                tensor_queue.running = GONE  # before all else: who is interrupted here, too, has said so
            self._called_away()
            raise

    def _enter(self, launch: Launch[Entry], operation: Waited) -> Deliver | None:
        """Enters a bucket on a thread that waits for ``operation``. None: that is over, and maybe so is the bucket."""
        try:
            deliver: Deliver | None = launch.position.run.resume(launch, operation)
        except DdlInternalError as error:
            self._explain(error)
            self._failed(launch, None)
            self._tensor_queue.own = None
            return None
        return deliver

    def _land_here(self, launch: Launch[Entry], begun_ns: int) -> bool:
        """Hands over what a waiting user thread has run in place.

        False where Drain must decide first: the engine's.
        """
        assert launch.entries is not None
        rest = iter(launch.entries)
        position, meter = launch.position, self._meter
        with self._tensor_queue.lock:
            took_ns = now_ns() - begun_ns
            if self._tensor_queue.frozen:
                return False
            meter.replayed += 1
            meter.nbytes[position.planned.kind] += position.nbytes
            meter.busy_ns += took_ns
            meter.idle_ns -= took_ns  # the engine's thread takes it for idle
            self._rest = rest
            self._mixed = False
            self._landing = launch  # no call since ``frozen``
            self._tensor_queue.own = None
        self._finish_landing()
        if (hooks := self.trace_hooks) is not None:
            hooks.bucket(*_ran(launch), begun_ns, begun_ns + took_ns)
        return True

    def _finish_landing(self) -> None:
        """Hands over what is left of it, whoever began: each entry in one run of stores, or in a call without effect twice."""
        launch = self._landing
        assert launch is not None and launch.entries is not None
        self._tensor_queue.delivered(launch)
        with self._completion.lock:
            for entry in self._rest:
                if entry.__class__ is PersistentRequest:  # type() would be a call, behind which a handler may raise
                    entry.index = -1
                    entry.source.owner = None
                    entry.state = IDLE
                else:
                    self._mixed = True
            for entry in launch.entries if self._mixed else ():
                if not isinstance(entry, PersistentRequest):
                    entry.handle.complete(entry.number, None, -1)
                    entry.handle.pass_on(self._queue)
            self._landing = None
        self._completion.announce()

    def _let_go(self) -> None:
        """A thread that may have helped goes on to wait. The engine enters what it has launched and not entered."""
        with self._tensor_queue.lock:
            if self._tensor_queue.running == get_ident():
                self._take_over()
            if not self._tensor_queue.running and (self._queue or self._stopped or self._tensor_queue.is_ready()):
                self._tensor_queue.work.notify()

    def _take_over(self) -> None:
        """What a thread that helped has begun, and is not at the end of, becomes the engine's. Lock held."""
        todo: Callable[[], None] | None = None
        if self._landing is not None:
            todo = self._finish_landing
        elif self._tensor_queue.own is not None:
            todo = partial(self._go_on, self._tensor_queue.own)
        self._tensor_queue.own = None  # no call from here on but the last
        self._tensor_queue.running = 0
        if todo is not None:
            self._queue.appendleft(todo)

    def _called_away(self) -> None:
        """An exception ends what a thread did here. Interrupted itself: the control thread looks once a second."""
        with self._tensor_queue.lock:
            self._tensor_queue.work.notify()

    def _go_on(self, launch: Launch[Entry]) -> None:
        deliver = self._take_part(launch, partial(launch.position.run.resume, launch))
        if deliver is not None:
            self._settle(launch, deliver)

    def _take_part(self, launch: Launch[Entry], run: Callable[[], Deliver | Later]) -> Deliver | Later | None:
        """Runs a bucket. What it raises is explained, and ends the bucket and mostly the job."""
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
        if launch.bucket is None:
            self._meter.nbytes[position.planned.kind] += position.nbytes
        else:
            self._meter.nbytes[position.planned.kind] += _brought(launch.entries)
        self._tensor_queue.delivered(launch)
        self._deliver(launch.entries, outcomes, -1)

    def _failed(self, launch: Launch[Entry], error: BaseException | None) -> None:
        if launch.entries is not None:
            self._tensor_queue.delivered(launch)
            self.fail(launch.entries, error)

    def drain(self, message: Drain) -> None:
        """On the engine's thread: takes part in what others have launched, then judges what is held."""
        if self._failure.given:
            return  # ``abandon`` sees to what is held
        begun_ns = now_ns()
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
        if (hooks := self.trace_hooks) is not None:
            valid = sum(launch.place <= lowest[launch.planned.set_id] for launch, _ in held)
            hooks.drain(message.epoch, begun_ns, valid, len(held) - valid)
        if not any(isinstance(item, Resume) for item in message.items):
            self._tensor_queue.discover(message.epoch + 1)
            if hooks is not None:
                hooks.discover(message.epoch + 1)

    def resume(self, message: Resume, sets: Mapping[int, Sequence[int]], rank: int) -> None:
        """On the engine's thread: what was decided before has run; from here on the schedule gives what is ready."""
        if (hooks := self.trace_hooks) is not None:
            buckets = self._tensor_queue.planned(message.schedule)
            hooks.replay(message.epoch, message.schedule, buckets, message.start)
        frozen = self._tensor_queue.resume(message, sets, rank)
        if frozen is not None:
            self.say(frozen)

    def abandon(self) -> None:
        """On the engine's thread: the job is over, nobody will decide on what is held."""
        held, self._held = self._held + self.in_flight.all(), []
        for launch, _ in held:
            self._failed(launch, None)

    # --- ends

    def _explain(self, error: BaseException) -> None:
        """A transport that fails has most likely lost a peer: the control network knows which."""
        if isinstance(error, DdlInternalError) and self._failure.wait(FAILURE_WAIT_S):
            return
        if not isinstance(error, DdlInternalError):
            log.error("the engine failed", exc_info=error)
            wrapped = TransportError(f"the engine failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._broken(error)

    def _deliver(self, entries: Sequence[Entry | None], outcomes: Sequence[Outcome | None], index: int) -> None:
        after: list[Callable[[], None]] = []
        with self._completion.lock:
            for entry, outcome in zip(entries, outcomes):
                if type(entry) is PersistentRequest:  # as its ``complete`` would, hundreds of times a step
                    entry.index = index
                    entry.source.owner = None
                    entry.state = IDLE
                elif entry is not None:
                    entry.handle.complete(entry.number, outcome, index)
                    then = entry.handle.over()
                    if then is not None:
                        after.append(then)
        self._completion.announce()
        for then in after:
            then()

    def fail(self, entries: Sequence[Entry | None], error: BaseException | None, index: int = -1) -> None:
        """Ends the entries' handles with ``error``, or with the failure of the job."""
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
    """What trace hooks are told of it, and its place; -1 for one outside schedules."""
    if isinstance(todo, Launch):
        return todo.bucket or todo.position.planned, todo.place
    return todo[0], -1


def _brought(entries: Sequence[Entry | None]) -> int:
    """Bytes of this rank's own tensors."""
    return sum(entry.spec.nbytes(entry.rows) for entry in entries if entry is not None)
