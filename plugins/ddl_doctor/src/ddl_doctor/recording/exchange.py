"""Bring the ranks' parts of a timeline to the first rank through the job's store, if no launcher of ddl collects them.

No rank removes a part before the first rank has said that it has it, so a part may stay somewhere, but is not lost.
"""

from __future__ import annotations

import contextlib
import enum
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.errors import DdlInternalError, DeadlineExceeded
from ddlcore.observe.timeline_parts import part_of

BEGIN_S = 2.0  # for the other ranks to begin the timeline that one rank has already ended


class Taken(enum.Enum):
    """What the first rank says of a part: it has a copy, it reads the file itself, or it has said nothing."""

    COPIED = b"copied"
    READ = b"read"
    NOT = b""


@dataclass
class Collected:
    """What the first rank has got of the other ranks' parts, beside those that are in its own directory anyway."""

    other_directories: list[Path] = field(default_factory=list)  # parts in other directories of this host
    unfinished: list[int] = field(default_factory=list)  # ranks that have not ended the timeline
    absent: list[int] = field(default_factory=list)  # ranks that have not begun it
    trouble: str = ""  # why nobody could be asked any more


class PartExchange:
    """The exchange of the parts of one timeline. ``number`` is that of the timeline among those of the ranks."""

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._prefix = f"timeline/{number}/"
        self._answers = f"timeline answers/{number}/"  # they are not deleted: a rank may read its answer late

    def announce(self, rank: int) -> None:
        """Tell the other ranks that ``rank`` records. Errors are ignored."""
        with contextlib.suppress(DdlInternalError):  # without the store, no part can be sent in the end
            self._store.set(f"{self._prefix}begun/{rank}", b"")

    def has_begun(self, rank: int, timeout_s: float) -> bool:
        """Return whether ``rank`` records, as far as is known within ``timeout_s`` seconds."""
        try:
            self._store.get(f"{self._prefix}begun/{rank}", timeout_s)
        except DdlInternalError:
            return False
        return True

    def send(self, rank: int, path: Path, shared: bool) -> bool:
        """Send the part of ``rank`` to the first rank, and return whether this was possible.

        The content of the file ``path`` is sent unless ``shared`` is true: then the first rank reads it on this host.
        """
        try:
            data = b"" if shared else zlib.compress(path.read_bytes(), 1)
            self._store.set(f"{self._prefix}{rank}", b"\0".join([str(path).encode(), data]))
        except (DdlInternalError, OSError):
            return False
        return True

    def taken(self, rank: int, timeout_s: float) -> Taken:
        """Return what the first rank has said of the part of ``rank`` within ``timeout_s`` seconds."""
        try:
            return Taken(self._store.get(f"{self._answers}{rank}", timeout_s))
        except DdlInternalError:
            return Taken.NOT

    def collect(
        self, ranks: Iterable[int], directory: Path, is_new: Callable[[Path], bool], timeout_s: float
    ) -> Collected:
        """Wait for the parts of ``ranks``, and write those that are not in ``directory`` to it. The first rank calls this.

        ``is_new`` tells a part of this timeline from one that an earlier job has left. The wait ends after ``timeout_s``
        seconds, also if the store does not answer, and sooner for ranks that have not begun.
        """
        found = Collected()
        deadline_s = time.monotonic() + timeout_s
        begin_s = min(deadline_s, time.monotonic() + BEGIN_S)
        try:
            for rank in ranks:
                try:
                    self._store.get(f"{self._prefix}begun/{rank}", max(begin_s - time.monotonic(), 0.0))
                except DeadlineExceeded:
                    found.absent.append(rank)
                    continue
                try:
                    data = self._store.get(f"{self._prefix}{rank}", max(deadline_s - time.monotonic(), 0.0))
                except DeadlineExceeded:
                    found.unfinished.append(rank)
                    continue
                self._take(rank, data, directory, is_new, found)
                if time.monotonic() > deadline_s + BEGIN_S:
                    raise DeadlineExceeded("the job's store answers too late")
            self._store.delete(self._prefix)
        except (DdlInternalError, OSError, zlib.error) as error:
            found.trouble = str(error).partition("\n")[0]
        return found

    def _take(self, rank: int, data: bytes, directory: Path, is_new: Callable[[Path], bool], found: Collected) -> None:
        where, _, packed = data.partition(b"\0")
        path = Path(where.decode())
        here = directory / path.name
        answer = Taken.READ
        if not packed:
            if path.parent != directory:
                found.other_directories.append(path)
        elif not is_new(here):  # else the rank has written it here itself, on a file system that its host shares
            part_of(directory, rank).write_bytes(zlib.decompress(packed))
            answer = Taken.COPIED
        self._store.set(f"{self._answers}{rank}", answer.value)
