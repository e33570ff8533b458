"""One rank's part of a world, as the API, the framework packages and the launcher see it."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddlcore.config.loading import Settings
from ddlcore.contracts.store import Store
from ddlcore.control.channel import Channel
from ddlcore.control.store import JobStore
from ddlcore.errors import DdlInternalError, NotInitialized
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.messages.elastic import Finished, WorldReport
from ddlcore.messages.observing import Digests, Observation
from ddlcore.messages.to_coordinator import COMMIT, STOP
from ddlcore.messages.to_rank import Adjust
from ddlcore.observe.signals import listen
from ddlcore.plug.registry import Registry
from ddlcore.process.compressors import Compressors
from ddlcore.process.observers import RankObserver, observers
from ddlcore.process.parts import Parts
from ddlcore.process.verification import Verification
from ddlcore.process.world_place import WorldPlace
from ddlcore.reentry import Lock, reentrant
from ddlcore.runtime.companion import Companions
from ddlcore.runtime.counted_calls import CountedCalls
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Stats
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.request import Entry, PersistentRequest
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.runtime.waiter import Waiter
from ddlcore.threads import on_own_thread

log = logging.getLogger("ddl")


class Job:
    """The part of one rank in one world: its connections, threads, communicators and operations.

    An operation, handle, optimizer or hook keeps a reference to the job that it uses.
    """

    def __init__(
        self,
        world_place: WorldPlace,
        network: Callable[[], tuple[Channel, JobStore]],
        registry: Registry,
        settings: Settings,
    ) -> None:
        """Create the job without connecting to other ranks; ``start`` connects.

        ``world_place``: where this process is in the launch and in this world. ``network`` connects to the coordinator
        and to the store.
        """
        self.placement = placement = world_place.placement
        self.launched = world_place.launched  # the placement in the whole launch, not only in this world
        self.address = world_place.address
        self.timeline_dir = world_place.timeline_dir  # where the launcher expects a timeline's part; "": nowhere
        self.rank, self.size = placement.rank, placement.size
        self.local_rank, self.local_size = placement.local_rank, placement.local_size
        self.settings = settings
        self.registry = registry
        self.closed = False
        self.forked = False
        self._world_place = world_place
        self._network = network
        self.kernels = CpuKernels(settings.text("cache_dir"), late=True)
        self._compressors = Compressors(registry, self.kernels, lambda: self.settings.text("compression"))
        self.compressor = self._compressors.get
        self._companions = Companions(self)
        self.companion = self._companions.get
        # The requests of blocking calls, by name and process set; made at the first call.
        self.persistent_requests: dict[Any, PersistentRequest] = {}
        self._failure = JobFailure()
        self.verification = Verification(self._failure)
        self._counted = {
            STOP: CountedCalls(STOP, "should_stop()", self._failure),
            COMMIT: CountedCalls(COMMIT, "commit()", self._failure),
        }
        self.stop_calls, self.commit_calls = self._counted[STOP], self._counted[COMMIT]
        self._before: Stats | None = None  # what this process has counted in its earlier worlds
        self._lock = Lock()
        self._ordinals: Counter[str] = Counter()
        self._started = False
        self._deafen: Callable[[], None] = lambda: None  # stops listening to the signal of the setting flight_signal
        self._observers: list[RankObserver] = []
        _jobs.add(self)

    # --- begin

    def start(self) -> None:
        """Wait for the other ranks, and open the communicator of all ranks. All ranks of the world must call this.

        Raises PeerLost if a rank dies during the call, DeadlineExceeded if ranks are missing after ``start_timeout_s``
        or the communicator is not open after ``open_timeout_s``, and TransportError if no transport can connect these
        ranks. Raises PluginError or ValueError if an observer of this rank cannot be started; this rank has then left
        the job.
        """
        log_at(self.settings.text("log_level"))
        switch_ms = self.settings.number("switch_interval_ms")
        if switch_ms > 0:  # if another thread has the interpreter lock, a thread that wakes waits so long for the lock
            sys.setswitchinterval(switch_ms / 1000)
        self.overlaps = self.settings.overlaps(self.placement.cross_size)
        self._connect()
        # Almost every operation needs this one, and its first use would import its module in the middle of training:
        # if a signal handler imports a module within that import, Python 3.11 and earlier raise a KeyError.
        self.compressor("none")
        if self.settings.text("flight_dir"):
            self._deafen = listen(self.settings.text("flight_signal"), self._want_dump)
        self._parts.start()
        try:
            self._parts.enter(self.overlaps)
            self._observers += observers(self, os.environ)
        except BaseException as error:
            self._leave(f"init failed: {error}", patience_s=0.0)
            raise
        self._started = True

    def _connect(self) -> None:
        """Create the parts of this job, and bind those methods here that callers use for every tensor or every step.

        They are attributes to save a call; adapters use them, too (contracts/framework.py). ``start_request`` starts
        the operation of one tensor, see Submission.start_request. ``start_all`` starts many operations, for a caller
        that will wait next. ``start_and_wait`` starts one operation and waits for it, see UserThreads.start_and_wait.
        """
        self._parts: Parts = Parts(
            self._world_place,
            self.registry,
            self.settings,
            self._network(),
            self._failure,
            self._counted,
            self.verification,
            self._compressors,
            self._adjust,
            self._before,
        )
        parts = self._parts
        self.sets: ProcessSets = parts.sets
        self.world_store: Store = parts.world_store
        self.tensor_queue: TensorQueue = parts.tensor_queue
        self.lookout: Lookout = parts.lookout
        self.waiter: Waiter = parts.waiter
        self.device_label = parts.accelerators.label
        self.start_request: Callable[..., None] = parts.submission.start_request
        self.start_all: Callable[..., None] = parts.submission.start_all
        self.start_and_wait: Callable[..., None] = parts.engine.user_threads.start_and_wait
        self.run_unnamed: Callable[..., bool] = parts.engine.user_threads.run_unnamed
        self.check_stall: Callable[[float], float] = parts.lookout.check_stall
        self.members = parts.sets.members
        self.context = parts.sets.context
        self.name_entries: Callable[..., None] = parts.submission.name

    def _adjust(self, message: Adjust) -> None:
        """Apply new values of settings that a search for better settings has chosen.

        The engine's thread calls this. All ranks apply the values at the same point in the order of the buckets.
        """
        values = dict(message.values)
        if "overlap" in values:
            self.overlaps = values.pop("overlap") == "on"
        if values:
            self.settings = self.settings.changed(values)
            self._parts.reopen(self.settings)

    # --- in between

    def tell(self, message: Observation | Digests | Finished) -> None:
        """Send a report about this rank to the coordinator. Any thread may call this. The call does not wait.

        A report of digests with ``fatal`` set is refused if the job has already ended: the call raises the error with
        which the job has ended. In a forked process, the call has no effect.
        """
        if self.forked:
            return
        if isinstance(message, Digests):
            self.verification.check(message)
        self._parts.outbox.say(message)

    def submit(self, entries: Sequence[Entry], waits: bool = False) -> None:
        """Submit all ``entries`` or, if an error is raised, none of them. Any thread may call this.

        ``waits``: the caller will wait for these entries next, so another thread need not be woken to run them. Raises
        InvalidArgument (a ValueError) if an operation of the same name is still in flight, the error of the job if the
        job has ended, and ReentrantCall if the calling thread is inside another call of ddl.
        """
        if self._parts.engine.user_threads.amid():
            raise reentrant("an operation")
        self._parts.submission.submit(entries, waits)

    def start_timeline(self, file: str, mark_cycles: bool = False, directory: str = "") -> None:
        """Start to record a timeline into ``file``; see ``TimelineSwitch.begin``.

        ``mark_cycles``: mark where each period of a schedule begins. ``directory``: where the launcher expects the
        parts of the ranks, which the launcher merges; "" if the ranks must merge the parts themselves.
        """
        self._refuse_inside("start_timeline()")
        self._parts.start_timeline(Path(file), mark_cycles, Path(directory) if directory else None)

    def stop_timeline(self, patience_s: float = 10.0) -> None:
        """Stop recording the timeline. The call has no effect if no timeline is being recorded.

        ``patience_s``: how long rank 0 waits for the parts of the other ranks, in seconds; see ``TimelineSwitch.end``.
        """
        self._refuse_inside("stop_timeline()")
        self._parts.timeline.end(patience_s)

    def go_on_from(self, before: Job) -> None:
        """Let the counts of ``stats`` go on from those of ``before``, this process's job in its last world.

        A request to stop that was not carried out there is made again.
        """
        self.stop_calls.go_on_from(before.stop_calls)
        self._before = before.stats() if before._started else before._before

    def stats(self) -> Stats:
        """Return what this process has counted since init; see ``Stats`` for the keys.

        Any thread may call this at any moment. The call takes no lock.
        """
        return self._parts.stats()

    def stats_of_world(self) -> Stats:
        """Return the same as ``stats``, but counted in this world only. Any thread may call this."""
        return self._parts.stats_of_world()

    @property
    def report(self) -> WorldReport | None:
        """What was known of this world when it began; None before that, or if the job is not elastic."""
        return self._parts.standing.report

    @property
    def is_over(self) -> bool:
        """Whether this rank has left the job or the job has failed. Any thread may read this property."""
        return self.closed or self._failure.given

    def failed_with(self) -> BaseException | None:
        """Return the error with which the job has failed; None if the job has not failed. Any thread may call this."""
        return self._failure.error() if self._failure.given else None

    def has_shown_failure(self) -> bool:
        """Return whether a user thread or an operation has got the error of the job; ``failed_with`` counts, too."""
        return self._failure.shown or self._failure.met

    def progress(self) -> tuple[int, int]:
        """Return two numbers: how many buckets were negotiated and how many were replayed on this rank since ``init``.

        If two calls return different results, a bucket was completed between the two calls. Any thread may call this.
        """
        meter = self._parts.meter
        return meter.negotiated, meter.replayed

    def doing(self) -> str:
        """Return a text that describes what this rank is doing now. Any thread may call this."""
        return self.lookout.describe_state()

    def launched_members(self, set_id: int) -> tuple[int, ...]:
        """Return the members of the process set ``set_id`` as ranks of the whole launch, not of this world.

        Return () if all ranks of the launch are members, or if the set does not exist. Any thread may call this.
        """
        members = tuple(self._world_place.ranks[rank] for rank in self.sets.all().get(set_id, ()))
        return members if len(members) < self.launched.size else ()

    def inside(self) -> bool:
        """Return whether the calling thread is one of ddl's own threads or is just executing a call of ddl.

        Such a thread must not begin another call that waits. This matters for signal handlers and finalizers, because
        they can run in the middle of a call of ddl.
        """
        return self._started and (self._parts.inside() or self._lock.held())

    def _refuse_inside(self, what: str) -> None:
        if self.inside() or on_own_thread():
            raise reentrant(what)

    def _want_dump(self) -> None:
        self._parts.control_thread.dump_wanted = True

    def joined(self) -> None:
        """Record that this rank has returned from ``join()``. The thread that called ``join()`` calls this."""
        for calls in self._counted.values():
            calls.joined()

    def dump_flight(self, reason: str, text: str) -> Path | None:
        """Write the last actions of this rank to a file in the directory that the setting ``flight_dir`` names.

        Any thread may call this. ``reason`` is a short word and ``text`` is a sentence that say why the file is
        written. Return the path of the file, or None if no file was written.
        """
        return None if self.forked else self._parts.dump_flight(reason, text)

    def next_ordinal(self, what: str) -> int:
        """Return how many earlier calls of this method had the same argument ``what``, and count this call.

        Ranks that make these calls in the same order get the same numbers.
        """
        ordinal = self._ordinals[what]
        self._ordinals[what] += 1
        return ordinal

    def retire(self) -> None:
        """Forget all persistent requests that blocking calls have kept for later calls with the same name.

        A later call with such a name creates a new persistent request. Without this method, requests whose names are
        never used again would fill the memory.
        """
        known, self.persistent_requests = self.persistent_requests, {}
        self.tensor_queue.retire(known.values())

    def disown(self) -> None:
        """Make the job unusable in this process, which was forked from the process that called ``init``."""
        self.forked = True
        tensor_queue = getattr(self, "tensor_queue", None)
        if tensor_queue is not None:
            tensor_queue.disown(
                lambda: DdlInternalError(
                    f"a collective was called in a process forked from rank {self.rank}; "
                    "only the process that called init() takes part (a DataLoader worker must not)"
                )
            )

    # --- end

    def break_off(self, reason: str) -> None:
        """Make this rank lost for the others at once, because it cannot go on for ``reason``. Any thread may call this.

        Its operations raise DdlInternalError from now on, and it still knows its rank. No effect if the job has ended.
        """
        if self._started and not self.closed and not self.forked and not self._failure.given:
            self._parts.break_off(reason, DdlInternalError(f"this rank has left the job, because it has {reason}"))

    def shutdown(
        self, reason: str = "called shutdown()", settle: bool = False, patience_s: float | None = None
    ) -> None:
        """Leave the world. A second call has no effect.

        Buckets that the coordinator has already announced run to their end. All other unfinished operations raise
        Closed. Other ranks need not call ``shutdown`` at the same time. If another rank later makes a call that needs
        this rank, that call raises PeerLost. ``reason``: why this rank leaves, a text for the other ranks. ``patience_s``:
        how long the announced buckets, and then the coordinator's answer, may take; None: ``leave_timeout_s``. With 0,
        operations that are in flight fail on the other ranks, too.

        ``settle``: true if the user's program has ended. Then this rank leaves only after the work of all companions is
        complete and the coordinator has compared the digests of the parameters. Raises ReplicasDiffer, after this rank
        has left, if the parameters differ. Raises ReentrantCall, and changes nothing, if a signal handler or a
        finalizer calls this in a thread that is just executing another call of ddl.
        """
        if not self.closed:
            self._refuse_inside("shutdown()")
        differ = None
        try:
            if settle and self._started and not self.closed and not self.forked:
                self._companions.settle()
                standing, timeout_s = self._parts.standing, self.settings.number("leave_timeout_s")
                differ = self.verification.settle(self._parts.outbox, standing.settled, timeout_s)
        finally:
            self._shut_down("raised ReplicasDiffer: in its last steps" if differ else reason, patience_s)
            self._companions.close()
        if differ is not None:
            raise differ

    def _shut_down(self, reason: str, patience_s: float | None) -> None:
        with self._lock:
            if self.closed or not self._started:
                self.closed = True
                return
            self.closed = True
        if self.forked:
            return
        self.tensor_queue.refuse(lambda: NotInitialized("ddl has been shut down; call init() again first"))
        self._leave(reason, self.settings.number("leave_timeout_s") if patience_s is None else patience_s)

    def _leave(self, reason: str, patience_s: float) -> None:
        """Leave the world, and close all parts of the job; see ``Parts.leave``."""
        self.closed = True
        for calls in self._counted.values():
            calls.close()
        while self._observers:
            self._observers.pop().close()
        try:
            self._parts.leave(reason, patience_s)
        finally:
            self._deafen()


def log_at(level: str) -> None:
    """Set the level of ddl's logger. Add a handler only if the user's program has configured none."""
    log.setLevel(level)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        # Whoever looks for a fault compares the times of several processes.
        time = "%(asctime)s " if level == "DEBUG" else ""
        handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


def _after_fork() -> None:
    """Make all jobs unusable in a forked child process.

    The child process has none of ddl's threads, so any wait for an operation in it would never end.
    """
    for job in list(_jobs):
        job.disown()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
