"""Records the timelines of one rank, and brings the parts of all ranks together if no launcher does this."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

from msgspec.structs import asdict

from ddl_doctor.recording.clock import compare
from ddl_doctor.recording.exchange import BEGIN_S, PartExchange, Taken
from ddl_doctor.recording.merge import merge
from ddl_doctor.recording.part_writer import Timeline, parts_beside, remove_if_empty
from ddl_doctor.recording.ring_buffer import RingBuffer
from ddl_doctor.recording.trace_hooks import TraceHooks
from ddl_doctor.recording.trace_writer import TraceWriter
from ddlcore.errors import DdlInternalError
from ddlcore.messages.elastic import WorldReport
from ddlcore.observe.clock import boot_id
from ddlcore.observe.timeline_parts import part_of, parts_in
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
        self._begun_ns = 0  # when the file was made, by the clock of the file system
        self._sent: list[tuple[PartExchange, Path]] = []  # parts of which the first rank has said nothing yet

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
            self._begun_ns = path.stat().st_mtime_ns
        except OSError as error:
            raise ValueError(f"timeline {file}: {error.strerror} ({error.filename})") from None
        self._file = None if directory is not None else file
        if self._file is not None:
            self._exchange = PartExchange(self._rank.store, self._made)
            self._exchange.announce(rank, path)
        self._timeline = timeline
        timeline.start()
        return TraceHooks(ring, self._rank.meter)

    def end(self, patience_s: float, leaving: bool) -> None:
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.stop()
            if self._file is not None and self._exchange is not None:
                self._bring_together(self._exchange, self._file, timeline.path, patience_s)
        if self._sent:
            self._settle(patience_s if leaving else 0.0, leaving)

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

    # --- if no launcher of ddl merges the parts

    def _bring_together(self, exchange: PartExchange, file: Path, path: Path, patience_s: float) -> None:
        rank, hosts, ranks = self._rank.launched.rank, self._rank.launched.hosts, self._rank.ranks
        first = ranks[0]
        if rank == first:
            self._collect(exchange, file, path, patience_s)
        elif exchange.has_begun(first, min(patience_s, BEGIN_S)) and exchange.send(
            rank, path, hosts[rank] == hosts[first]
        ):
            self._sent.append((exchange, path))
        else:
            log.warning("timeline %s: rank %d could not be told of this rank's part, %s", file, first, path)

    def _settle(self, patience_s: float, leaving: bool) -> None:
        """Remove the parts of which the first rank has a copy. Name those that it has not taken, if this is the last call."""
        sent, self._sent = self._sent, []
        until_s = time.monotonic() + patience_s
        for exchange, path in sent:
            answer = exchange.taken(self._rank.launched.rank, max(until_s - time.monotonic(), 0.0))
            if answer is Taken.COPIED:
                _remove([path])
            elif answer is Taken.NOT and not leaving:
                self._sent.append((exchange, path))
            elif answer is Taken.NOT and path.exists():
                first = self._rank.ranks[0]
                log.warning("timeline: rank %d has not taken this rank's part, which stays in %s", first, path)

    def _collect(self, exchange: PartExchange, file: Path, path: Path, patience_s: float) -> None:
        directory = path.parent
        found = exchange.collect(self._rank.ranks[1:], directory, self._is_new, patience_s)
        for who, what in (
            (found.unfinished, f"had not stopped it within {patience_s:g} s"),
            (
                found.absent,
                "has not begun it: it has not called start_timeline(), or ddl-doctor is not installed there",
            ),
        ):
            if who:
                log.warning("timeline %s: rank %s %s", file, ", ".join(map(str, who)), what)
        parts = [path, *found.parts]
        if found.troubles:
            log.warning("timeline %s: not all parts could be taken: %s", file, "; ".join(found.troubles))
            # The others' names are not all known. Their parts may be in this directory, and they stay there in any case.
            parts += [one for one in parts_in(directory) if one not in parts and self._is_new(one)]
        try:
            problems = merge(parts, file)
        except OSError as error:
            log.warning("timeline %s: %s; the ranks' parts are in %s", file, error.strerror, directory)
            return
        for problem in problems:
            log.warning("timeline %s: %s", file, problem)
        if problems or found.unfinished or found.troubles:
            log.warning("timeline %s: the ranks' parts are also in %s", file, directory)
        else:
            _remove(parts)

    def _is_new(self, part: Path) -> bool:
        """Return whether ``part`` was written since this rank began: another one was left by an earlier job."""
        try:
            return part.stat().st_mtime_ns >= self._begun_ns
        except OSError:
            return False


def _remove(parts: Sequence[Path]) -> None:
    """Remove ``parts``, and their directories if nothing else is there."""
    for part in parts:
        with contextlib.suppress(OSError):
            part.unlink()
        remove_if_empty(part.parent)
