"""Takes what ranks on other hosts write: lines for the user, results of a function, and parts of a timeline."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from ddlcore.launch.agents.wire import Data
from ddlcore.launch.output.output import Output
from ddlcore.observe.timeline_parts import part_of

_PART = re.compile(r"timeline(\.[1-9][0-9]{0,5})?")


class RankStreams:
    """The streams of all ranks that agents run. The control server's thread calls ``take``.

    ``say`` shows a line to the user. ``acknowledge(agent, nbytes)`` tells an agent that so many bytes were taken, so that
    it may send more; any thread may call it.
    """

    def __init__(self, say: Callable[[str], None], acknowledge: Callable[[int, int], None]) -> None:
        self.output: Output | None = None  # shows what ranks write; None: it is dropped
        self.timeline_dir: Path | None = None  # where the ranks' parts of a timeline are written; None: nowhere
        self.arrived = 0  # bytes received so far
        self._say = say
        self._acknowledge = acknowledge
        self._lock = threading.Lock()
        self._feeding = 0  # pieces of output that are not yet shown
        self._results: dict[tuple[int, int], bytearray] = {}  # by agent and rank: the part of the pickled result so far
        self._parts: dict[tuple[int, int, str], Path] = {}  # of a timeline, by agent, rank and stream

    @property
    def is_feeding(self) -> bool:
        """Whether a slow screen has not yet shown all that has arrived."""
        return self._feeding > 0

    def result(self, agent: int, rank: int) -> bytes | None:
        """Return the pickled result that ``rank`` has sent by ``agent``; None if it has sent none."""
        data = self._results.get((agent, rank))
        return None if data is None else bytes(data)

    def take(self, agent: int, piece: Data, served: Collection[int]) -> None:
        """Take a piece of a stream, which ``agent`` has sent. ``served``: all ranks that the agent has ever run."""
        nbytes = len(piece.data)
        self.arrived += nbytes
        if piece.stream == "result":
            self._results.setdefault((agent, piece.rank), bytearray()).extend(piece.data)
            self._acknowledge(agent, nbytes)
        elif _PART.fullmatch(piece.stream):
            if piece.rank in served:
                self._write_part(agent, piece)
            self._acknowledge(agent, nbytes)
        elif self.output is not None:
            with self._lock:
                self._feeding += 1
            self.output.feed(piece.rank, piece.stream, piece.data, lambda: self._shown(agent, nbytes))

    def _write_part(self, agent: int, piece: Data) -> None:
        if self.timeline_dir is None or not piece.data:
            return
        # In an elastic job, processes of one rank may have run on several hosts, each of which numbers its own parts.
        key = agent, piece.rank, piece.stream
        if key not in self._parts:
            self._parts[key] = part_of(self.timeline_dir, piece.rank)
        path = self._parts[key]
        try:
            with open(path, "ab") as file:
                file.write(piece.data)
        except OSError as error:
            self._say(f"{path}: {error.strerror}")
            self.timeline_dir = None

    def _shown(self, agent: int, nbytes: int) -> None:
        with self._lock:
            self._feeding -= 1
        self._acknowledge(agent, nbytes)
