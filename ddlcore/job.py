"""Connects the parts of one rank in one world when the job starts, and closes these parts when the job ends.

Packages of the same layer do not import each other. Only this module and the modules in launch/ create objects of
several such packages and pass these objects to each other.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ddlcore.build import build_transport, patience_of
from ddlcore.builtin.solo import QueuedSolo
from ddlcore.config import Settings
from ddlcore.contracts.compressor import Compressor
from ddlcore.contracts.kernels import Kernels
from ddlcore.contracts.store import PrefixStore, Store
from ddlcore.contracts.transport import Context
from ddlcore.control.channel import Channel
from ddlcore.control.store import JobStore
from ddlcore.errors import Closed, DdlInternalError, DeadlineExceeded, InvalidArgument, NotInitialized, ReplicasDiffer
from ddlcore.kernels.cpu import CpuKernels
from ddlcore.messages import (
    BY_SETTING,
    COMMIT,
    PROTOCOL,
    STOP,
    Bye,
    Digests,
    Done,
    Explain,
    Finished,
    Hello,
    Profile,
    Pulse,
    Sample,
    Settle,
    WorldReport,
)
from ddlcore.observe.flight import Flight
from ddlcore.observe.signals import listen
from ddlcore.plug.registry import Registry
from ddlcore.runtime.companion import C, Companions
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.control_thread import ControlThread
from ddlcore.runtime.counted_calls import CountedCalls
from ddlcore.runtime.device.accelerators import Accelerators
from ddlcore.runtime.dispatch import Dispatcher
from ddlcore.runtime.engine import FAILURE_WAIT_S, Engine
from ddlcore.runtime.executor import HostExecutor
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.meter import Meter, Stats, added, world_stats
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.process_sets import Opener, ProcessSets
from ddlcore.runtime.ranges import Ranges, in_use, ranges_of
from ddlcore.runtime.reentry import Lock, reentrant
from ddlcore.runtime.request import Entry, PersistentRequest
from ddlcore.runtime.routes import choose_route
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.runtime.timeline_switch import TimelineSwitch
from ddlcore.runtime.waiter import Waiter
from ddlcore.telemetry import Observer, observers
from ddlcore.threads import on_own_thread
from ddlcore.types import Member, Placement, Value

log = logging.getLogger("ddl")
VERSION = "0.1.0"
ABORT_WAIT_S = 2.0


class Job:
    """The part of one rank in one world: its connections, threads, communicators and operations.

    An operation, handle, optimizer or hook keeps a reference to the job that it uses.
    """

    def __init__(
        self,
        launched: Placement,
        ranks: tuple[int, ...],
        ordinal: int,
        network: Callable[[], tuple[Channel, JobStore]],
        registry: Registry,
        settings: Settings,
        address: str = "",
        launched_by: str = "",
        timeline_dir: str = "",
        elastic: bool = False,
    ) -> None:
        """Create the job without connecting to other ranks; ``start`` connects.

        ``launched``: where the launcher placed this process. ``ranks``: the launched ranks that are in this world.
        ``ordinal``: how many times this rank has asked for a world of these ranks, with this time. ``network`` connects
        to the coordinator and the store. ``address``: this host's own address, see Context.address. ``launched_by``:
        the launcher's name; some transports work only with one launcher. ``timeline_dir``: the directory in which the
        launcher expects this rank's part of a timeline. ``elastic``: the world is one of an elastic job, and ``ordinal`` is
        its generation.
        """
        self.placement = launched.among(ranks)
        self.rank = self.placement.rank
        self.size = self.placement.size
        self.settings = settings
        self.registry = registry
        self.closed = False
        self.forked = False
        self.launched = launched  # the placement in the whole launch, not only in this world
        self._launched_by = launched_by
        self._timeline_dir = timeline_dir
        self._ranks = ranks
        self._ordinal = ordinal
        self._elastic = elastic
        self._network = network
        self.address = address
        self._kernels = CpuKernels(settings.text("cache_dir"), late=True)
        self._compressors: dict[str, Compressor] = {}
        self.companions = Companions(self)
        self.persistent_requests: dict[
            Any, PersistentRequest
        ] = {}  # requests of blocking calls, by name and process set; made at the first call
        self._verifiers: dict[tuple[int, str], Verifying] = {}  # by process set and label
        self._told = False  # whether digests were sent for which a difference ends the job
        self._shown = False  # whether an exception has told a user thread why the job is over
        self._failure = JobFailure()
        self._counted = {
            STOP: CountedCalls(STOP, "should_stop()", self._failure),
            COMMIT: CountedCalls(COMMIT, "commit()", self._failure),
        }
        self.stop_calls, self.commit_calls = self._counted[STOP], self._counted[COMMIT]
        self._meter = Meter()
        self._before: Stats | None = None  # what this process has counted in its earlier worlds
        self._lock = Lock()
        self._ordinals: Counter[str] = Counter()
        self._started = False
        self._reopened = 0
        self._deafen: Callable[[], None] = lambda: None  # stops listening to the signal of the setting flight_signal
        self._observers: list[Observer] = []
        _jobs.add(self)

    @property
    def local_rank(self) -> int:
        return self.placement.local_rank

    @property
    def local_size(self) -> int:
        return self.placement.local_size

    @property
    def cross_rank(self) -> int:
        return self.placement.cross_rank

    @property
    def cross_size(self) -> int:
        return self.placement.cross_size

    @property
    def is_homogeneous(self) -> bool:
        return self.placement.is_homogeneous

    # --- begin

    def start(self) -> None:
        """Wait for the other ranks, and open the communicator of all ranks. All ranks of the world must call this.

        Raises PeerLost if a rank dies during the call, DeadlineExceeded if ranks are missing after ``start_timeout_s``
        or the communicator is not open after ``open_timeout_s``, and TransportError if no transport can connect these
        ranks. Raises ValueError if an observer (metrics, pulses, samples) cannot be started.
        """
        log_at(self.settings.text("log_level"))
        switch_ms = self.settings.number("switch_interval_ms")
        if switch_ms > 0:  # if another thread has the interpreter lock, a thread that wakes waits so long for the lock
            sys.setswitchinterval(switch_ms / 1000)
        channel, store = self._network()
        self._build(channel, store)
        # Almost every operation needs this one, and its first use would import its module in the middle of training:
        # if a signal handler imports a module within that import, Python 3.11 and earlier raise a KeyError.
        self.compressor("none")
        if self.settings.text("flight_dir"):
            self._deafen = listen(self.settings.text("flight_signal"), self._want_dump)
        self._engine.start()
        self._control_thread.start()
        try:
            self._enter()
        except BaseException as error:
            self._leave(f"init failed: {error}", patience_s=0.0)
            raise
        file = self.settings.text("timeline")
        if file and file.upper() != "DYNAMIC":
            self.start_timeline(file, bool(self.settings["timeline_mark_cycles"]), self._timeline_dir)
        self._observe()
        self._started = True

    def _build(self, channel: Channel, store: JobStore) -> None:
        name = f"ddl-{{}}-{self.rank}"
        self._store = store
        self._flight = Flight(self.settings.whole("flight_records"))
        self._completion = completion = Completion()
        self._outbox = Outbox(channel.wake)
        self._session_store = session_store = _SessionStore(lambda: self._control_thread.session, store)
        opener = self._opener(session_store)
        self.sets = ProcessSets(opener)
        facts = {"ddl": VERSION, "fusion_bytes": self.settings.whole("fusion_bytes")}
        self._timeline = TimelineSwitch(
            self.sets, self._meter, session_store, store.clock, self.launched, self._ranks, facts
        )
        self.tensor_queue = TensorQueue(completion, self._outbox, self._flight, self._meter, self._timeline)
        self.overlaps = self.settings.overlaps(self.cross_size)
        self._executor = executor = HostExecutor(self.sets, self._kernels, self.compressor, self._meter)
        accelerators = self._accelerators(opener, executor)
        self.device_label = accelerators.label
        self._engine = Engine(
            Dispatcher(self.sets, executor, accelerators.executor),
            self.sets,
            self.tensor_queue,
            completion,
            DevicesInFlight(completion, self._meter, accelerators),
            self._outbox,
            self._failure,
            self._transport_failed,
            self._meter,
            name.format("engine"),
            self._timeline,
            self._ranges(),
        )
        self.waiter = Waiter(completion, self._engine, self.tensor_queue, self._failure, self._timeline)
        self.start_request = self.tensor_queue.start_request
        self.start_all = self.tensor_queue.start_all
        self.start_and_wait = self._engine.start_and_wait
        # Adapters use these two methods (contracts/framework.py). They are bound here to save a further call.
        self.members = self.sets.members
        self.name_entries = self.tensor_queue.name
        self._control_thread: ControlThread = ControlThread(
            channel,
            self.tensor_queue,
            self._engine,
            self._failure,
            self._break,
            self.sets,
            self._meter,
            patience_of(self.settings),
            self.rank,
            name.format("control"),
            self._outbox,
            self._timeline,
            self._counted,
            self._adjust,
            self._explain,
            self.dump_flight,
        )

    def _ranges(self) -> Ranges | None:
        """Return the function that shows a bucket as a range in the profilers of the frameworks that this process uses.

        Return None if the setting ``profiler_ranges`` is off.
        """
        if not self.settings["profiler_ranges"]:
            return None
        providers = [one for one in self.registry.adapters.values() if one.module != "ddlcore"]
        # The default argument keeps this ``one``: when the lambda is called, the generator has already taken the next.
        return ranges_of(in_use((one.module, lambda one=one: self.registry.load(one)()) for one in providers))  # type: ignore[misc]

    def _adjust(self, values: Mapping[str, Value]) -> None:
        """Apply new values of settings that a search for better settings has chosen.

        The engine's thread calls this. All ranks apply the values at the same point in the order of the buckets.
        """
        if "overlap" in values:
            self.overlaps = values["overlap"] == "on"
        others = {name: value for name, value in values.items() if name != "overlap"}
        if others:
            self.settings = self.settings.changed(others)
            self._reopened += 1
            self._executor.reopened()
            self.sets.reopen(replace(self._opener(self._session_store), generation=self._reopened))

    def _observe(self) -> None:
        """Start the observers that the settings ask for.

        If an observer cannot be started, the other observers are closed, this rank leaves the job, and ValueError is
        raised.
        """
        try:
            self._observers += observers(self)
        except BaseException as error:
            self._leave(f"init failed: {error}", patience_s=0.0)
            raise

    def tell(self, message: Pulse | Profile | Digests | Finished) -> None:
        """Send a report about this rank to the coordinator. Any thread may call this. The call does not wait.

        A report of digests with ``fatal`` set is refused if the job has already ended: the call raises the error with
        which the job has ended. In a forked process, the call has no effect.
        """
        if self.forked:
            return
        if isinstance(message, Digests) and message.fatal:
            if self._failure.given:
                raise self._failure.error(f"step {message.step} of {message.label}")
            self._told = True
        self._outbox.say(message)

    def digests(self, addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
        """Return digests of ranges of host memory, 8 bytes for each range; see ``CpuKernels.digests``.

        ``addresses[i]`` is the address of a range, and ``sizes[i]`` is the range's size in bytes.
        """
        return self._kernels.digests(addresses, sizes)

    def add_verifier(self, set_id: int, kind: str, verifier: Verifying) -> str:
        """Add ``verifier``, which compares one optimizer's parameters over the process set ``set_id``.

        ``kind``: the optimizer's name in messages. Return the label by which all ranks identify the optimizer: ``kind``
        and, from the second verifier of the same kind on, a number. So all members of the process set must add their
        verifiers in the same order.
        """
        ordinal = 1 + sum(
            known == set_id and label.partition(" number ")[0] == kind for known, label in self._verifiers
        )
        label = kind if ordinal == 1 else f"{kind} number {ordinal}"
        self._verifiers[set_id, label] = verifier
        return label

    def _explain(self, asked: Explain) -> Sample:
        verifier = self._verifiers.get((asked.set_id, asked.label))
        try:
            return Sample() if verifier is None else verifier.sample(asked)
        except Exception as error:  # an error of the framework must not replace the reason why the job ends
            log.debug("rank %d cannot show a tensor that differs: %r", self.rank, error)
            return Sample()

    def _settle_digests(self) -> ReplicasDiffer | None:
        """Wait until the coordinator has compared the parameters' digests of all ranks; return an error if they differ.

        Return None if there is no difference, if no result has come after ``leave_timeout_s``, or if a user thread has
        already raised the error with which the job has ended. Only digests that were sent with ``fatal`` set are waited
        for; a difference between other digests does not end the job.
        """
        if not self._told or self._shown:
            return None
        if not self._failure.given:
            self._outbox.say(Settle())
            deadline_s = time.monotonic() + self.settings.number("leave_timeout_s")
            # This loop polls and takes no lock: a signal handler may interrupt the loop at any moment and may call
            # shutdown itself.
            while not self._control_thread.settled.is_set() and time.monotonic() < deadline_s:
                time.sleep(0.002)
        error = self._failure.error("shutdown") if self._failure.given and not self._shown else None
        return error if isinstance(error, ReplicasDiffer) else None

    def _opener(self, store: _SessionStore) -> Opener:
        backend = self.settings.text("backend")
        return Opener(
            rank=self.rank,
            members=tuple(Member(rank, host) for rank, host in enumerate(self.placement.hosts)),
            store=store,
            kernels=self._kernels,
            settings=self.settings,
            timeout_s=self.settings.number("open_timeout_s"),
            route=lambda members: choose_route(backend, members, self.registry, self._launched_by),
            build=partial(build_transport, self.registry),
            address=self.address,
        )

    def _accelerators(self, opener: Opener, host: HostExecutor) -> Accelerators:
        return Accelerators(
            self.registry,
            self.settings,
            opener,
            self.sets,
            QueuedSolo,
            self._compressor,
            lambda: self._failure.given,
            self._meter,
            self.local_rank,
            self._launched_by,
            host,
        )

    def _enter(self) -> None:
        fusion_bytes, first_bytes = self.settings.whole("fusion_bytes"), self.settings.whole("first_bucket_bytes")
        place = (self.launched.rank, () if self._elastic else self._ranks, self._ordinal)
        sizes = (fusion_bytes, os.getpid(), first_bytes)
        hello = Hello(*place, PROTOCOL, VERSION, *sizes, self.overlaps, self.settings.text("join_average"))
        self._outbox.say(hello)
        timeout_s = self.settings.number("start_timeout_s")
        if not self._control_thread.welcomed.wait(timeout_s):
            self._outbox.say(Bye("gave up waiting in init", waited_s=timeout_s))
            self._control_thread.welcomed.wait(1.0)
            why = f"the coordinator did not answer; waited {timeout_s:g} s (DDL_START_TIMEOUT_S)"
            raise DeadlineExceeded(f"init: {self._control_thread.refusal or why}")
        if self._control_thread.late:  # the deadline of another rank has passed
            raise DeadlineExceeded(f"init: {self._control_thread.refusal}")
        # The coordinator that refuses this rank may end immediately, before this thread runs again, and then the loss
        # of the connection is reported as well. The refusal came first and is the cause, so it is checked first.
        if self._control_thread.refusal:
            raise DdlInternalError(self._control_thread.refusal)
        if self._failure.given:
            raise self._failure.error("init")
        self._open_global(self.settings.number("open_timeout_s"))

    def _open_global(self, timeout_s: float) -> None:
        opened = threading.Event()
        failure: list[BaseException] = []

        def open_global() -> None:
            try:
                self.sets.add(0, tuple(range(self.size)))
            except BaseException as error:
                failure.append(error)
            opened.set()

        self._control_thread.engage("init(), opening the transport", open_global, has_deadline=True)
        while not opened.wait(0.1):
            timeout_s -= 0.1
            if timeout_s < -5.0:  # the transport has its own deadline, and has not kept it
                self.sets.abort()
                raise DeadlineExceeded("init: the transport did not open in time (DDL_OPEN_TIMEOUT_S)")
        if failure:
            self._failure.wait(FAILURE_WAIT_S if isinstance(failure[0], DdlInternalError) else 0.0)
            raise self._failure.error("init") if self._failure.given else failure[0]

    # --- in between

    # These three are for callers that submit the same tensors in every step. ``start_request`` starts the operation of
    # one tensor, see TensorQueue.start_request. ``start_all`` starts many operations, for a caller that will wait next.
    # ``start_and_wait`` starts one operation and waits for it, see Engine.start_and_wait. They are attributes, not
    # methods, to save a call in the hot path.
    start_request: Callable[..., None]
    start_all: Callable[..., None]
    start_and_wait: Callable[..., None]

    def submit(self, entries: Sequence[Entry], waits: bool = False) -> None:
        """Submit all ``entries`` or, if an error is raised, none of them. Any thread may call this.

        ``waits``: the caller will wait for these entries next, so another thread need not be woken to run them. Raises
        InvalidArgument (a ValueError) if an operation of the same name is still in flight, the error of the job if the
        job has ended, and ReentrantCall if the calling thread is inside another call of ddl.
        """
        if self._engine.amid():
            raise reentrant("an operation")
        self.tensor_queue.submit(entries, waits)

    def check_stall(self, since_s: float) -> float:
        """Leave replay if a thread that waits outside ddl probably waits for an event that cannot happen in replay.

        ``since_s``: the time of ``time.monotonic()`` at which the thread began to wait. The thread must call this again
        from time to time: return the longest time, in seconds, until the next call. See ``TensorQueue.check_stall``.
        """
        return self.tensor_queue.check_stall(since_s)

    def companion(self, kind: type[C]) -> C:
        """Return the companion of class ``kind``: an object that makes calls of ddl for a framework in the background.

        The job has only one companion of each class. The first call for a class creates that companion.
        """
        return self.companions.get(kind)

    def start_timeline(self, file: str, mark_cycles: bool = False, directory: str = "") -> None:
        """Start to record a timeline into ``file``; see ``TimelineSwitch.begin``.

        ``mark_cycles``: mark where each period of a schedule begins. ``directory``: where the launcher expects the
        parts of the ranks, which the launcher merges; "" if the ranks must merge the parts themselves.
        """
        self._refuse_inside("start_timeline()")
        place = Path(directory) if directory else None
        self._timeline.begin(Path(file), mark_cycles, place, self._control_thread.session, self.report)

    def stop_timeline(self, patience_s: float = 10.0) -> None:
        """Stop recording the timeline. The call has no effect if no timeline is being recorded.

        ``patience_s``: how long rank 0 waits for the parts of the other ranks, in seconds; see ``TimelineSwitch.end``.
        """
        self._refuse_inside("stop_timeline()")
        self._timeline.end(patience_s)

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
        own = self.stats_of_world()
        return own if self._before is None else added(self._before, own)

    def stats_of_world(self) -> Stats:
        """Return what ``stats`` does, but only what was counted in this world. The same threads may call it."""
        world = world_stats(self.size, self.report)
        return self._meter.stats(self.waiter.waited_s, self.sets.routes(), self.tensor_queue.steps(), world)

    @property
    def report(self) -> WorldReport | None:
        """What was known of this world when it began; None before that, or if the job is not elastic."""
        return self._control_thread.report

    @property
    def is_over(self) -> bool:
        """Whether this rank has left the job or the job has failed. Any thread may read this property."""
        return self.closed or self._failure.given

    def failed_with(self) -> BaseException | None:
        """Return the error with which the job has failed; None if the job has not failed. Any thread may call this."""
        return self._failure.error() if self._failure.given else None

    def progress(self) -> tuple[int, int]:
        """Return two numbers: how many buckets were negotiated and how many were replayed on this rank since ``init``.

        If two calls return different results, a bucket was completed between the two calls. Any thread may call this.
        """
        return self._meter.negotiated, self._meter.replayed

    def doing(self) -> str:
        """Return a text that describes what this rank is doing now. Any thread may call this."""
        return self._control_thread.describe_state()

    def launched_members(self, set_id: int) -> tuple[int, ...]:
        """Return the members of the process set ``set_id`` as ranks of the whole launch, not of this world.

        Return () if all ranks of the launch are members, or if the set does not exist. Any thread may call this.
        """
        members = tuple(self._ranks[rank] for rank in self.sets.all().get(set_id, ()))
        return members if len(members) < self.launched.size else ()

    def inside(self) -> bool:
        """Return whether the calling thread is one of ddl's own threads or is just executing a call of ddl.

        Such a thread must not begin another call that waits. This matters for signal handlers and finalizers, because
        they can run in the middle of a call of ddl.
        """
        return self._started and (self._engine.inside() or self._timeline.inside or self._lock.held())

    def _refuse_inside(self, what: str) -> None:
        if self.inside() or on_own_thread():
            raise reentrant(what)

    def _want_dump(self) -> None:
        self._control_thread.dump_wanted = True

    def joined(self) -> None:
        """Record that this rank has returned from ``join()``. The thread that called ``join()`` calls this."""
        for calls in self._counted.values():
            calls.joined()

    def dump_flight(self, reason: str, text: str) -> Path | None:
        """Write the last actions of this rank to a file in the directory that the setting ``flight_dir`` names.

        Any thread may call this. ``reason`` is a short word and ``text`` is a sentence that say why the file is
        written. Return the path of the file, or None if no file was written.
        """
        directory = self.settings.text("flight_dir")
        if not directory or self.forked:
            return None
        replay_status = self.tensor_queue.replay_status()
        more = {
            "replay_status": None if replay_status is None else msgspec.to_builtins(replay_status),
            "pending": self.tensor_queue.pending(),
            "stats": self.stats(),
        }
        groups, under_way = self.sets.all(), self.tensor_queue.under_way()
        return self._flight.dump(Path(directory), self.rank, self.size, reason, text, groups, under_way, more)

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

    def compressor(self, name: str) -> Compressor:
        """Return this job's compressor called ``name``. Raises InvalidArgument for a name that no plugin offers.

        For the name "setting", return the compressor that the setting ``compression`` names on this rank. Buckets do
        not use this result for "setting": the coordinator chooses the compressor of a bucket for all ranks, see
        ``Spec.compressor_by``.
        """
        if name == BY_SETTING:
            name = self.settings.text("compression")
        compressor = self._compressors.get(name)
        if compressor is None:
            compressor = self._compressors[name] = self._compressor(name, self._kernels)
        return compressor

    def _compressor(self, name: str, kernels: Kernels) -> Compressor:
        provider = self.registry.compressors.get(name)
        if provider is None:
            raise InvalidArgument(
                f"no compressor is called {name!r}; there are {', '.join(sorted(self.registry.compressors))}"
            )
        compressor: Compressor = self.registry.load(provider)(kernels)
        return compressor

    def context(self, part: str) -> Context:
        """Return the context for an additional communicator of all ranks.

        The communicator uses the part of the store that is called ``part``. The ranks open such a communicator in
        addition to the job's own transports, for example to measure a transport.
        """
        return self.sets.context(part)

    def _break(self, make: Callable[[str], BaseException]) -> None:
        """End the job with an error. Operations in flight and later calls raise this error.

        ``make`` creates the error. The argument of ``make`` is the name of the call that raises the error ("" if there
        is none). Any thread may call this. Only the first call has an effect.
        """

        def shown(during: str) -> BaseException:
            if not threading.current_thread().name.startswith("ddl-"):  # a user thread
                self._shown = True
            return make(during)

        # The order matters. The failure is given first, so that every thread that is woken below finds the reason. The
        # dump is written before ``close``, which empties the list of pending operations. Pending operations fail before
        # the transports are aborted: an abort may take a second, and waiting threads need not wait for the abort.
        if not self._failure.give(shown):
            return
        self._flight.note("end", error=str(make("")))
        self.dump_flight("error", str(make("")))
        pending = self.tensor_queue.close(lambda: shown(""))
        self._shown = self._shown or bool(pending)
        self._engine.fail(pending, None)
        self._engine.post(self._engine.abandon)
        self.sets.abort()

    def _transport_failed(self, error: BaseException) -> None:
        self._outbox.say(Bye(f"its transport failed: {error}", broken=True))
        self._break(lambda during: error)

    # --- end

    def shutdown(self, reason: str = "called shutdown()", settle: bool = False) -> None:
        """Leave the world. A second call has no effect.

        Buckets that the coordinator has already announced run to their end. All other unfinished operations raise
        Closed. Other ranks need not call ``shutdown`` at the same time. If another rank later makes a call that needs
        this rank, that call raises PeerLost. ``reason``: why this rank leaves, a text for the other ranks.

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
                self.companions.settle()
                differ = self._settle_digests()
        finally:
            self._shut_down("raised ReplicasDiffer: in its last steps" if differ else reason)
            self.companions.close()
        if differ is not None:
            raise differ

    def _shut_down(self, reason: str) -> None:
        with self._lock:
            if self.closed or not self._started:
                self.closed = True
                return
            self.closed = True
        if self.forked:
            return
        self.tensor_queue.refuse(lambda: NotInitialized("ddl has been shut down; call init() again first"))
        self._leave(reason, self.settings.number("leave_timeout_s"))

    def _leave(self, reason: str, patience_s: float) -> None:
        """Tell the coordinator that this rank leaves, and close all parts of the job.

        ``patience_s``: how long the engine may take to run the buckets that were already announced, in seconds.
        ``reason``: why this rank leaves, a text for the other ranks.
        """
        self.closed = True
        for calls in self._counted.values():
            calls.close()
        while self._observers:
            self._observers.pop().close()
        if not self._failure.given:
            self._outbox.say(Bye(reason, broken=patience_s == 0.0 and bool(self._control_thread.session)))
            self._control_thread.parted.wait(patience_s)
        clean = self._engine.stop(patience_s if not self._failure.given else ABORT_WAIT_S)
        if not clean:
            self._break(lambda during: Closed("the job was shut down before this was complete"))
            self.sets.abort()
            if not self._engine.stop(ABORT_WAIT_S):
                log.warning("rank %d: a transport did not end when it was aborted", self.rank)
        left = self.tensor_queue.close(lambda: NotInitialized("ddl has been shut down; call init() again first"))
        self._engine.fail(left, Closed("the job was shut down before this was complete"))
        self._timeline.end(patience_s if clean and not self._failure.given else 1.0)
        if clean and not self._failure.given:
            self._outbox.say(Done())
        self._control_thread.stop(ABORT_WAIT_S)
        self._deafen()
        self._store.close()


def log_at(level: str) -> None:
    """Set the level of ddl's logger. Add a handler only if the user's program has configured none."""
    log.setLevel(level)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        # Whoever looks for a fault compares the times of several processes.
        time = "%(asctime)s " if level == "DEBUG" else ""
        handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


class Verifying(Protocol):
    """An object that keeps the digests of one optimizer's parameters; see ``Job.add_verifier``."""

    def sample(self, asked: Explain) -> Sample:
        """Return the values that the coordinator asks for. The control thread calls this, so the call must not wait."""


class _SessionStore(PrefixStore):
    """The part of the store that belongs to one world. The keys of this part begin with the name of the world.

    The name of the world is known only after all ranks have called ``init``. So each access calls ``session``, which
    returns that name.
    """

    def __init__(self, session: Callable[[], str], base: Store) -> None:
        self._session = session
        self._base = base

    @property
    def _prefix(self) -> str:  # type: ignore[override]  # a property here, a constant in the base class
        return self._session() + "/"


_jobs: weakref.WeakSet[Job] = weakref.WeakSet()


def _after_fork() -> None:
    """Make all jobs unusable in a forked child process.

    The child process has none of ddl's threads, so any wait for an operation in it would never end.
    """
    for job in list(_jobs):
        job.disown()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
