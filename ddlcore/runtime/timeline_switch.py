"""Turns the timeline of one rank's job on and off, passes events to it, and collects the parts of all ranks."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns

from msgspec.structs import asdict

from ddlcore.contracts.store import Store
from ddlcore.errors import DdlInternalError
from ddlcore.messages.elastic import WorldReport
from ddlcore.messages.to_rank import Bucket, Planned
from ddlcore.observe.clock import Reading, boot_id, compare
from ddlcore.observe.gather import collect, send
from ddlcore.observe.merge import merge, parts_in
from ddlcore.observe.ring_buffer import RingBuffer
from ddlcore.observe.timeline import Timeline, part_of, remove_directory, remove_if_empty
from ddlcore.observe.trace_hooks import TraceHooks
from ddlcore.observe.trace_writer import TraceWriter
from ddlcore.runtime.events import Submitted
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.runtime.reentry import Lock
from ddlcore.types import Kind, Placement

log = logging.getLogger("ddl")


def parts_beside(file: Path) -> Path:
    """Return the directory in which the ranks write their parts, before the parts are merged into ``file``."""
    return file.with_name(file.name + ".ranks")


class TimelineSwitch:
    """Starts and ends the timeline of one rank, and receives the rank's events (see runtime.events.Events).

    User threads call ``begin`` and ``end``. Only one timeline can be recorded at a time; ``on`` says whether a timeline
    is being recorded.
    """

    def __init__(
        self,
        sets: ProcessSets,
        meter: Meter,
        store: Store,
        clock: Callable[[], Reading],
        launched: Placement,
        ranks: Sequence[int],
        facts: Mapping[str, object],
    ) -> None:
        """Create the switch. No timeline is recorded yet.

        ``clock`` reads the clock of the process that keeps the store; the trace uses it as the common clock of all
        ranks. ``launched`` is this process's rank among all launched ranks, with their hosts. ``ranks`` are those of
        the launched ranks that belong to this world. ``facts`` are other facts about the job that each trace must
        contain.
        """
        self.on = False
        self._hooks: TraceHooks | None = None
        self._sets = sets
        self._meter = meter
        self._store = store
        self._clock = clock
        self._launched = launched
        self._ranks = tuple(ranks)
        self._facts = dict(facts)
        self._lock = Lock()
        self._timeline: Timeline | None = None
        self._file: Path | None = None  # where this rank merges the parts; None: the launcher merges them
        self._made = 0

    @property
    def inside(self) -> bool:
        """Return whether the calling thread is inside ``begin`` or ``end``."""
        return self._lock.held()

    def begin(
        self, file: Path, mark_cycles: bool, directory: Path | None, world: str, report: WorldReport | None = None
    ) -> None:
        """Begin to record a timeline into ``file``.

        ``directory`` is where the launcher expects the ranks' parts, which it merges itself; None if the ranks must
        merge them. ``mark_cycles`` is passed to the trace writer; ``world`` names the world in the trace. ``report`` is
        what is known of the world of an elastic job: there, ranks have the number of the launch in the trace. Raises
        ValueError, with a message of one line, if a timeline is already recorded or its file cannot be written.
        """
        self._lock.refuse("start_timeline()")
        with self._lock:
            if self._timeline is not None:
                raise ValueError(f"a timeline is being recorded to {self._timeline.path}; call stop_timeline() first")
            file = file.absolute()
            if file.is_dir():
                raise ValueError(f"timeline {file} is a directory; name a file")
            self._made += 1
            ring = RingBuffer()
            rank, host = self._launched.rank, socket.gethostname()
            own = self._ranks.index(rank) if report is None else rank
            facts = {"rank": own, "size": len(self._ranks), "host": host, "world": world, **self._facts}
            mark = None if report is None else asdict(report)
            writer = TraceWriter(rank, own, host, self._transport, mark_cycles, mark)
            try:
                path = part_of(directory or parts_beside(file), rank)
                timeline = Timeline(ring, writer, path, facts, self._look)
            except OSError as error:
                raise ValueError(f"timeline {file}: {error.strerror} ({error.filename})") from None
            self._file = None if directory is not None else file
            self._timeline = timeline
            timeline.start()
            self._hooks = TraceHooks(ring, self._meter)
            self.on = True

    def end(self, patience_s: float) -> None:
        """End the timeline.

        If the launcher does not merge the parts, the other ranks send their parts to rank 0. Rank 0 waits at most
        ``patience_s`` seconds for these parts, and merges the parts that have arrived.
        """
        self._lock.refuse("stop_timeline()")
        with self._lock:
            timeline, self._timeline = self._timeline, None
            if timeline is None:
                return
            self.on = False
            self._hooks = None
            timeline.stop()
            if self._file is not None:
                self._bring_together(self._file, timeline.path, patience_s)

    # --- events, which are passed on to the trace hooks while a timeline is recorded

    # Each method reads the hooks once, because a user thread may end the timeline at any moment.

    def submitted(self, entries: Sequence[Submitted], together: bool) -> None:
        if (hooks := self._hooks) is not None:
            hooks.submitted(entries, together)

    def decided(self, bucket: Bucket) -> None:
        if (hooks := self._hooks) is not None:
            hooks.decided(bucket)

    def completed(self, ran: Bucket | Planned, place: int, begun_ns: int, ended_ns: int) -> None:
        if (hooks := self._hooks) is not None:
            hooks.completed(ran, place, begun_ns, ended_ns)

    def waited(self, since_ns: int, until_ns: int) -> None:
        if (hooks := self._hooks) is not None:
            hooks.waited(since_ns, until_ns)

    def resumed(self, epoch: int, schedule: int, buckets: Sequence[Planned], start: int) -> None:
        if (hooks := self._hooks) is not None:
            hooks.resumed(epoch, schedule, buckets, start)

    def frozen(self, epoch: int) -> None:
        if (hooks := self._hooks) is not None:
            hooks.frozen(epoch)

    def drained(self, epoch: int, begun_ns: int, valid: int, void: int) -> None:
        if (hooks := self._hooks) is not None:
            hooks.drained(epoch, begun_ns, valid, void)

    def left(self, epoch: int) -> None:
        if (hooks := self._hooks) is not None:
            hooks.left(epoch)

    # --- what the writing thread asks for

    def _transport(self, set_id: int, kind: Kind) -> str:
        try:
            return self._sets.route(set_id).serving(kind).name
        except DdlInternalError:  # the process set was removed meanwhile
            return "ddl"

    def _look(self) -> tuple[int, int] | None:
        try:
            return compare(self._clock, perf_counter_ns, boot_id())
        except (DdlInternalError, ValueError):  # without the coordinator, the last comparison stays valid
            return None

    # --- without a launcher

    def _bring_together(self, file: Path, path: Path, patience_s: float) -> None:
        hosts = self._launched.hosts
        first = self._ranks[0]
        prefix = f"timeline/{self._made}/"
        if self._launched.rank != first:
            send(self._store, f"{prefix}{self._launched.rank}", path, hosts[self._launched.rank] == hosts[first])
            if hosts[self._launched.rank] != hosts[first]:
                with contextlib.suppress(OSError):
                    path.unlink()
                remove_if_empty(path.parent)
            return
        missing = collect(self._store, prefix, self._ranks[1:], path.parent, patience_s)
        if missing:
            who = ", ".join(map(str, missing))
            log.warning("timeline %s: rank %s had not stopped it within %g s", file, who, patience_s)
        try:
            for problem in merge(parts_in(path.parent), file):
                log.warning("timeline %s: %s", file, problem)
            if not missing:
                remove_directory(path.parent)
        except OSError as error:
            log.warning("timeline %s: %s; the ranks' parts are in %s", file, error.strerror, path.parent)
