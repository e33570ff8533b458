"""Creates the parts of one rank in one world, connects them, and ends them together.

Packages of the same layer do not import each other. Only this module and the modules in launch/ create objects of
several such packages and pass these objects to each other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddlcore.config.loading import Settings
from ddlcore.contracts.store import PrefixStore, Store
from ddlcore.control.channel import Channel
from ddlcore.control.store import JobStore
from ddlcore.errors import Closed, DdlInternalError, DeadlineExceeded, NotInitialized
from ddlcore.messages.observing import Explain, Sample
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.messages.spec import PROTOCOL
from ddlcore.messages.to_coordinator import Bye, Done, Hello
from ddlcore.messages.to_rank import Adjust, Drain, Resume
from ddlcore.observe.flight import Flight
from ddlcore.plug.registry import Registry
from ddlcore.process.accelerators import Accelerators
from ddlcore.process.build import build_transport, patience_of
from ddlcore.process.compressors import Compressors
from ddlcore.process.verification import Verification
from ddlcore.process.world_place import WorldPlace
from ddlcore.runtime.completion import Completion
from ddlcore.runtime.control_thread import ControlThread
from ddlcore.runtime.counted_calls import CountedCalls
from ddlcore.runtime.decisions import Decisions
from ddlcore.runtime.dispatch import Dispatcher
from ddlcore.runtime.engine import FAILURE_WAIT_S, Engine
from ddlcore.runtime.epochs import Epochs
from ddlcore.runtime.executor import HostExecutor
from ddlcore.runtime.in_flight import DevicesInFlight
from ddlcore.runtime.job_failure import JobFailure
from ddlcore.runtime.lookout import Lookout
from ddlcore.runtime.meter import Meter, Stats, added, world_stats
from ddlcore.runtime.outbox import Outbox
from ddlcore.runtime.process_sets import Opener, ProcessSets
from ddlcore.runtime.ranges import Ranges, in_use, ranges_of
from ddlcore.runtime.request import Entry
from ddlcore.runtime.routes import choose_route
from ddlcore.runtime.standing import Standing
from ddlcore.runtime.submission import Submission
from ddlcore.runtime.tensor_queue import TensorQueue
from ddlcore.runtime.timeline_switch import TimelineSwitch
from ddlcore.runtime.waiter import Waiter
from ddlcore.types import Member
from ddlcore.version import VERSION

if TYPE_CHECKING:
    from ddlcore.runtime.recorder import Recorder

log = logging.getLogger("ddl")
ABORT_WAIT_S = 2.0


class Parts:
    """The connected parts of one rank in one world. ``enter`` makes the rank a member, and ``leave`` ends all parts.

    The coordinator's decisions are carried out here (``WorkQueue``), and the control thread asks here about the rank
    (``Informed``).
    """

    def __init__(
        self,
        world_place: WorldPlace,
        registry: Registry,
        settings: Settings,
        connection: tuple[Channel, JobStore],
        failure: JobFailure,
        counted: Mapping[str, CountedCalls],
        verification: Verification,
        compressors: Compressors,
        adjust: Callable[[Adjust], None],
        before: Stats | None,
    ) -> None:
        """Create the parts, without a thread. ``connection``: to the coordinator, and to the store of the job.

        ``counted`` has a counter for each kind of call at which all ranks may act together. ``adjust`` uses new values
        of settings; the engine's thread calls it. ``before``: what this process has counted in its earlier worlds.
        """
        channel, store = connection
        self._world_place, self._placement = world_place, world_place.placement
        self.rank = self._placement.rank
        self._pid = os.getpid()
        self._registry, self._settings = registry, settings
        self._failure, self._verification = failure, verification
        self._kernels = compressors.kernels
        self._before = before
        self._store = store
        self._reopened = 0
        self.adjust = adjust
        self.meter = Meter()
        self.flight = Flight(settings.whole("flight_records"))
        self.standing = Standing(self.end)
        self.outbox = Outbox(channel.wake)
        completion = Completion()
        self.world_store = _WorldStore(self.standing, store)
        self.sets = ProcessSets(self._opener(settings, self.world_store))
        facts = {"ddl": VERSION, "fusion_bytes": settings.whole("fusion_bytes")}
        self.timeline = TimelineSwitch(partial(self._recorder, facts))
        self.tensor_queue = TensorQueue(completion, self.outbox, self.flight, self.timeline)
        self.submission = Submission(self.tensor_queue)
        self._epochs = Epochs(self.tensor_queue)
        self._executor = HostExecutor(self.sets, self._kernels, compressors.get, self.meter)
        self.accelerators = self._accelerators(compressors)
        self.engine = self._engine(completion)
        self.post, self.fail = self.engine.post, self.engine.fail
        self._decisions = Decisions(self.tensor_queue, self._epochs, self, self.timeline)
        self.lookout = Lookout(self.tensor_queue, self.engine, self._decisions.engaged, self.outbox, self.meter)
        self.waiter = Waiter(completion, self.engine.user_threads, self.lookout, failure, self.timeline)
        self.control_thread = ControlThread(
            channel,
            self.outbox,
            self.tensor_queue,
            self.lookout,
            self._decisions,
            self.standing,
            counted,
            self,
            self.meter,
            patience_of(settings),
        )

    def _recorder(self, facts: Mapping[str, object]) -> Recorder:
        from ddlcore.runtime.recorder import RecordedRank  # here, because few ranks record a timeline

        made: type[Recorder] = self._registry.load(self._registry.named(Registry.recorders, "timeline"))
        place, clock = self._world_place, self._store.clock
        return made(RecordedRank(self.sets, self.meter, self.world_store, clock, place.launched, place.ranks, facts))

    def _accelerators(self, compressors: Compressors) -> Accelerators:
        return Accelerators(
            self._registry,
            self._settings,
            self.sets,
            compressors.make,
            lambda: self._failure.given,
            self.meter,
            self._placement.local_rank,
            self._world_place.launched_by,
            self._executor,
        )

    def _engine(self, completion: Completion) -> Engine:
        return Engine(
            Dispatcher(self.sets, self._executor, self.accelerators.executor),
            self.sets,
            self.tensor_queue,
            completion,
            DevicesInFlight(completion, self.meter, self.accelerators),
            self._failure,
            lambda error: self.break_off(f"its transport failed: {error}", error),
            self.meter,
            f"ddl-engine-{self.rank}",
            self._ranges(),
        )

    def _opener(self, settings: Settings, store: Store) -> Opener:
        backend = settings.text("backend")
        return Opener(
            rank=self.rank,
            members=tuple(Member(rank, host) for rank, host in enumerate(self._placement.hosts)),
            store=store,
            kernels=self._kernels,
            settings=settings,
            timeout_s=settings.number("open_timeout_s"),
            route=lambda members: choose_route(backend, members, self._registry, self._world_place.launched_by),
            build=partial(build_transport, self._registry),
            address=self._world_place.address,
        )

    def _ranges(self) -> Ranges | None:
        """Return the function that shows a bucket as a range in the profilers of the frameworks that this process uses.

        Return None if the setting ``profiler_ranges`` is off.
        """
        if not self._settings["profiler_ranges"]:
            return None
        providers = [one for one in self._registry.adapters.values() if one.module != "ddlcore"]
        # The default argument keeps this ``one``: when the lambda is called, the generator has already taken the next.
        return ranges_of(in_use((one.module, lambda one=one: self._registry.load(one)()) for one in providers))  # type: ignore[misc]

    # --- begin

    def start(self) -> None:
        """Start the threads of the parts. From then on ``leave`` must be called in the end."""
        self.engine.start()
        self.control_thread.start()

    def enter(self, overlaps: bool) -> None:
        """Wait for the other ranks, and open the communicator of all ranks; see ``Job.start``."""
        settings, world_place, standing = self._settings, self._world_place, self.standing
        ranks = () if world_place.elastic else world_place.ranks
        asked = (LaunchedRank(world_place.launched.rank), ranks, world_place.ordinal)
        sizes = (settings.whole("fusion_bytes"), os.getpid(), settings.whole("first_bucket_bytes"))
        more = (settings.text("join_average"), settings.number("stall_shutdown_s"))
        self.outbox.say(Hello(*asked, PROTOCOL, VERSION, *sizes, overlaps, *more))
        timeout_s = settings.number("start_timeout_s")
        if not standing.welcomed.wait(timeout_s):
            self.outbox.say(Bye("gave up waiting in init", waited_s=timeout_s))
            standing.welcomed.wait(1.0)
            why = f"the coordinator did not answer; waited {timeout_s:g} s (DDL_START_TIMEOUT_S)"
            raise DeadlineExceeded(f"init: {standing.refusal or why}")
        if standing.late:  # the deadline of another rank has passed
            raise DeadlineExceeded(f"init: {standing.refusal}")
        # If the coordinator ends at once, the loss of the connection is reported as well, but the refusal is the cause.
        if standing.refusal:
            raise DdlInternalError(standing.refusal)
        if self._failure.given:
            raise self._failure.error("init")
        self._open_global(settings.number("open_timeout_s"))

    def _open_global(self, timeout_s: float) -> None:
        opened = threading.Event()
        failure: list[BaseException] = []

        def open_global() -> None:
            try:
                self.sets.add(0, tuple(range(self._placement.size)))
            except BaseException as error:
                failure.append(error)
            opened.set()

        self._decisions.engage("init(), opening the transport", open_global, has_deadline=True)
        while not opened.wait(0.1):
            timeout_s -= 0.1
            if timeout_s < -5.0:  # the transport has its own deadline, and has not kept it
                self.sets.abort()
                raise DeadlineExceeded("init: the transport did not open in time (DDL_OPEN_TIMEOUT_S)")
        if failure:
            self._failure.wait(FAILURE_WAIT_S if isinstance(failure[0], DdlInternalError) else 0.0)
            raise self._failure.error("init") if self._failure.given else failure[0]

    # --- in between

    def resume(self, message: Resume) -> None:
        self.timeline.resumed(message.epoch, message.schedule, self._epochs.planned(message.schedule), message.start)
        frozen = self._epochs.resume(message, self.sets.all(), self.rank)
        if frozen is not None:
            self.outbox.say(frozen)

    def drain(self, message: Drain) -> None:
        if self._failure.given:
            return  # ``abandon`` ends the buckets that are kept
        self.engine.drain(message)
        if not any(isinstance(item, Resume) for item in message.items):
            self._epochs.discover(message.epoch + 1)
            self.timeline.left(message.epoch + 1)

    def reopen(self, settings: Settings) -> None:
        """Open all communicators anew, by the new ``settings``. The engine's thread calls this, on all ranks."""
        self._settings = settings
        self._reopened += 1
        self._executor.reopened()
        self.sets.reopen(replace(self._opener(settings, self.world_store), generation=self._reopened))

    def explain(self, asked: Explain) -> Sample:
        return self._verification.explain(asked)

    def start_timeline(self, file: Path, mark_cycles: bool, directory: Path | None) -> None:
        self.timeline.begin(file, mark_cycles, directory, self.standing.session, self.standing.report)

    def stats(self) -> Stats:
        """Return what this process has counted since init; see ``Stats``. Any thread may call this. The call takes no lock."""
        own = self.stats_of_world()
        return own if self._before is None else added(self._before, own)

    def stats_of_world(self) -> Stats:
        """Return the same as ``stats``, but counted in this world only. Any thread may call this."""
        world = world_stats(self._placement.size, self.standing.report)
        return self.meter.stats(self.waiter.waited_s, self.sets.routes(), self.tensor_queue.steps(), world)

    def inside(self) -> bool:
        """Return whether the calling thread is one of ddl's own, or is in the middle of a call of ddl."""
        return self.engine.user_threads.inside() or self.timeline.inside

    def dump_flight(self, reason: str, text: str) -> Path | None:
        """Write the last actions of this rank to a file; see ``Job.dump_flight``."""
        directory = self._settings.text("flight_dir")
        if not directory or os.getpid() != self._pid:  # a forked process is no rank
            return None
        replay_status = self.lookout.replay_status()
        more = {
            "replay_status": None if replay_status is None else msgspec.to_builtins(replay_status),
            "pending": self.lookout.pending(),
            "stats": self.stats(),
        }
        groups, under_way = self.sets.all(), self.lookout.under_way()
        size = self._placement.size
        return self.flight.dump(Path(directory), self.rank, size, reason, text, groups, under_way, more)

    # --- end

    def end(self, make: Callable[[str], BaseException]) -> None:
        """End the job with an error. Operations in flight and later calls raise this error.

        ``make`` creates the error. The argument of ``make`` is the name of the call that raises the error ("" if there
        is none). Any thread may call this. Only the first call has an effect.
        """

        def shown(during: str) -> BaseException:
            if not threading.current_thread().name.startswith("ddl-"):  # a user thread
                self._failure.shown = True
            if during:
                self._failure.met = True
            return make(during)

        # The order matters: first the reason, which threads that are woken below look for; then the dump, before ``close``
        # empties the list of pending operations; these fail before the transports are aborted, which may take a second.
        if not self._failure.give(shown):
            return
        self.flight.note("end", error=str(make("")))
        self.dump_flight("error", str(make("")))
        pending: Sequence[Entry] = self.tensor_queue.close(lambda: shown(""))
        self._failure.shown = self._failure.shown or bool(pending)
        self.engine.fail(pending, None)
        self.engine.post(self.engine.abandon)
        self.sets.abort()

    def break_off(self, reason: str, error: BaseException) -> None:
        """End the job for all ranks: here with ``error``, and on the others by the loss of this rank for ``reason``."""
        self.outbox.say(Bye(reason, broken=True))
        self.end(lambda during: error)

    def leave(self, reason: str, patience_s: float) -> None:
        """Tell the coordinator that this rank leaves, unless the job has failed, and close all parts.

        ``patience_s``: how long the engine may take to run the buckets that were already announced, in seconds.
        ``reason``: why this rank leaves, a text for the other ranks.
        """
        if not self._failure.given:
            self.outbox.say(Bye(reason, broken=patience_s == 0.0 and bool(self.standing.session)))
            self.standing.parted.wait(patience_s)
        clean = self.engine.stop(patience_s if not self._failure.given else ABORT_WAIT_S)
        if not clean:
            self.end(lambda during: Closed("the job was shut down before this was complete"))
            self.sets.abort()
            if not self.engine.stop(ABORT_WAIT_S):
                log.warning("rank %d: a transport did not end when it was aborted", self.rank)
        left = self.tensor_queue.close(lambda: NotInitialized("ddl has been shut down; call init() again first"))
        self.engine.fail(left, Closed("the job was shut down before this was complete"))
        try:
            self.timeline.end(patience_s if clean and not self._failure.given else 1.0, leaving=True)
        except Exception:  # a plugin's recorder may raise anything, and this rank must still leave
            log.exception("rank %d: the timeline could not be ended", self.rank)
        if clean and not self._failure.given:
            self.outbox.say(Done())
        self.control_thread.stop(ABORT_WAIT_S)
        self._store.close()


class _WorldStore(PrefixStore):
    """The part of the store that belongs to one world. The keys of this part begin with the name of the world.

    The name of the world is known only after all ranks have called ``init``, so it is looked up at each access.
    """

    def __init__(self, standing: Standing, base: Store) -> None:
        self._standing = standing
        self._base = base

    @property
    def _prefix(self) -> str:  # type: ignore[override]  # a property here, a constant in the base class
        return self._standing.session + "/"
