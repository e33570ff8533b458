"""Records the timelines of one rank, and brings the parts of all ranks together if no launcher does this."""

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
from ddlcore.observe.clock import Reading, boot_id, compare
from ddlcore.observe.gather import collect, send
from ddlcore.observe.merge import merge, parts_in
from ddlcore.observe.ring_buffer import RingBuffer
from ddlcore.observe.timeline import Timeline, part_of, parts_beside, remove_directory, remove_if_empty
from ddlcore.observe.trace_hooks import TraceHooks
from ddlcore.observe.trace_writer import TraceWriter
from ddlcore.runtime.meter import Meter
from ddlcore.runtime.process_sets import ProcessSets
from ddlcore.types import Kind, Placement

log = logging.getLogger("ddl")


class TimelineRecorder:
    """Records one timeline after the other. Only one thread at a time may use this object."""

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
        """Create the recorder. No timeline is recorded yet.

        ``clock`` reads the clock of the process that keeps the store; the trace uses it as the common clock of all
        ranks. ``launched`` is this process's rank among all launched ranks, with their hosts. ``ranks`` are those of
        the launched ranks that belong to this world. ``facts`` are other facts about the job that each trace must
        contain.
        """
        self._sets = sets
        self._meter = meter
        self._store = store
        self._clock = clock
        self._launched = launched
        self._ranks = tuple(ranks)
        self._facts = dict(facts)
        self._timeline: Timeline | None = None
        self._file: Path | None = None  # where this rank merges the parts; None: the launcher merges them
        self._made = 0

    def begin(
        self, file: Path, mark_cycles: bool, directory: Path | None, world: str, report: WorldReport | None = None
    ) -> TraceHooks:
        """Begin to record a timeline into ``file``, and return the functions that add events to it.

        ``directory`` is where the launcher expects the ranks' parts, which it merges itself; None if the ranks must
        merge them. ``mark_cycles`` is passed to the trace writer; ``world`` names the world in the trace. ``report`` is
        what is known of the world of an elastic job: there, ranks have the number of the launch in the trace. Raises
        ValueError, with a message of one line, if a timeline is already recorded or its file cannot be written.
        """
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
        return TraceHooks(ring, self._meter)

    def end(self, patience_s: float) -> None:
        """End the timeline. The call has no effect if no timeline is being recorded.

        If the launcher does not merge the parts, the other ranks send their parts to rank 0. Rank 0 waits at most
        ``patience_s`` seconds for these parts, and merges the parts that have arrived.
        """
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return
        timeline.stop()
        if self._file is not None:
            self._bring_together(self._file, timeline.path, patience_s)

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
