"""Records the timelines of one rank, and brings the parts of all ranks together if no launcher does this."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

from msgspec.structs import asdict

from ddl_doctor.recording.clock import compare
from ddl_doctor.recording.exchange import BEGIN_S, PartExchange
from ddl_doctor.recording.merge import merge
from ddl_doctor.recording.part_writer import Timeline, parts_beside, remove_if_empty
from ddl_doctor.recording.ring_buffer import RingBuffer
from ddl_doctor.recording.trace_hooks import TraceHooks
from ddl_doctor.recording.trace_writer import TraceWriter
from ddlcore.errors import DdlInternalError
from ddlcore.messages.elastic import WorldReport
from ddlcore.observe.clock import boot_id
from ddlcore.observe.timeline_parts import part_of
from ddlcore.runtime.recorder import RecordedRank, Recorder
from ddlcore.types import Kind

log = logging.getLogger("ddl")


class TimelineRecorder(Recorder):
    """Records one timeline after the other; see ``Recorder``."""

    def __init__(self, rank: RecordedRank) -> None:
        self._rank = rank
        self._timeline: Timeline | None = None
        self._file: Path | None = None  # where this rank merges the parts; None: the launcher merges them
        self._made = 0
        self._exchange: PartExchange | None = None  # None: the launcher merges the parts

    def begin(
        self, file: Path, mark_cycles: bool, directory: Path | None, world: str, report: WorldReport | None
    ) -> TraceHooks:
        if self._timeline is not None:
            raise ValueError(f"a timeline is being recorded to {self._timeline.path}; call stop_timeline() first")
        file = file.absolute()
        if file.is_dir():
            raise ValueError(f"timeline {file} is a directory; name a file")
        self._made += 1
        ring = RingBuffer()
        rank, host = self._rank.launched.rank, socket.gethostname()
        own = self._rank.ranks.index(rank) if report is None else rank
        facts = {"rank": own, "size": len(self._rank.ranks), "host": host, "world": world, **self._rank.facts}
        mark = None if report is None else asdict(report)
        writer = TraceWriter(rank, own, host, self._transport, mark_cycles, mark)
        try:
            path = part_of(directory or parts_beside(file), rank)
            timeline = Timeline(ring, writer, path, facts, self._look)
        except OSError as error:
            raise ValueError(f"timeline {file}: {error.strerror} ({error.filename})") from None
        self._file = None if directory is not None else file
        if self._file is not None:
            self._exchange = PartExchange(self._rank.store, self._made)
            self._exchange.announce(rank, path.name)
        self._timeline = timeline
        timeline.start()
        return TraceHooks(ring, self._rank.meter)

    def end(self, patience_s: float) -> None:
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return
        timeline.stop()
        if self._file is not None:
            self._bring_together(self._file, timeline.path, patience_s)

    # --- what the writing thread asks for

    def _transport(self, set_id: int, kind: Kind) -> str:
        try:
            return self._rank.sets.route(set_id).serving(kind).name
        except DdlInternalError:  # the process set was removed meanwhile
            return "ddl"

    def _look(self) -> tuple[int, int] | None:
        try:
            return compare(self._rank.clock, perf_counter_ns, boot_id())
        except (DdlInternalError, ValueError):  # without the coordinator, the last comparison stays valid
            return None

    # --- without a launcher

    def _bring_together(self, file: Path, path: Path, patience_s: float) -> None:
        rank, hosts, ranks = self._rank.launched.rank, self._rank.launched.hosts, self._rank.ranks
        exchange, first = self._exchange, ranks[0]
        assert exchange is not None
        if rank != first:
            if not exchange.announced(first, min(patience_s, BEGIN_S)):
                text = "timeline %s: rank %d does not collect it, so this rank's part stays in %s"
                log.warning(text, file, first, path)
                return
            exchange.send(rank, path, hosts[rank] == hosts[first])
            if hosts[rank] != hosts[first]:
                _remove([path])
            return
        shared = [one for one in ranks if hosts[one] == hosts[first]]
        parts, unfinished, absent = exchange.collect(ranks[1:], shared, path.parent, patience_s)
        for who, what in (
            (unfinished, f"had not stopped it within {patience_s:g} s"),
            (absent, "has not begun it: it has not called start_timeline(), or ddl-doctor is not installed there"),
        ):
            if who:
                log.warning("timeline %s: rank %s %s", file, ", ".join(map(str, who)), what)
        try:
            for problem in merge([path, *parts], file):
                log.warning("timeline %s: %s", file, problem)
        except OSError as error:
            log.warning("timeline %s: %s; the ranks' parts are in %s", file, error.strerror, path.parent)
            return
        if not unfinished:  # else that rank still writes there
            _remove([path, *parts])


def _remove(parts: Sequence[Path]) -> None:
    """Remove ``parts``, which are in one directory, and the directory if nothing else is there."""
    for part in parts:
        with contextlib.suppress(OSError):
            part.unlink()
    remove_if_empty(parts[0].parent)
