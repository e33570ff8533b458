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
    """What the first rank has got of the other ranks' parts."""

    parts: list[Path] = field(default_factory=list)  # those that the first rank can read
    unfinished: list[int] = field(default_factory=list)  # ranks that have not ended the timeline
    absent: list[int] = field(default_factory=list)  # ranks that have not begun it
    troubles: list[str] = field(default_factory=list)  # why parts could not be asked for or stored


class PartExchange:
    """The exchange of the parts of one timeline. ``number`` is that of the timeline among those of the ranks."""

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._prefix = f"timeline/{number}/"
        self._answers = f"timeline answers/{number}/"  # they are not deleted: a rank may read its answer late

    def announce(self, rank: int, path: Path) -> None:
        """Tell the other ranks that ``rank`` records into the file ``path``. Errors are ignored."""
        with contextlib.suppress(DdlInternalError):  # without the store, no part can be sent in the end
            self._store.set(f"{self._prefix}begun/{rank}", str(path).encode())

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
        """Wait for the parts of ``ranks``, and write those of other hosts to ``directory``. The first rank calls this.

        ``is_new`` tells a part of this timeline from one that an earlier job has left. The wait ends some seconds after
        ``timeout_s`` at the latest, also if the store does not answer, and sooner for ranks that have not begun.
        """
        found = Collected()
        now_s = time.monotonic()
        begin_s, deadline_s = now_s + min(timeout_s, BEGIN_S), now_s + timeout_s
        try:
            for rank in ranks:
                if time.monotonic() > deadline_s + BEGIN_S:
                    raise DeadlineExceeded("the job's store answers too late")
                self._ask(rank, directory, is_new, begin_s, deadline_s, found)
            self._store.delete(self._prefix)
        except DdlInternalError as error:
            found.troubles.append(str(error).partition("\n")[0])
        return found

    def _ask(
        self,
        rank: int,
        directory: Path,
        is_new: Callable[[Path], bool],
        begin_s: float,
        deadline_s: float,
        found: Collected,
    ) -> None:
        """Wait for one part, until ``begin_s`` for its begin and ``deadline_s`` for its end, and add the result to ``found``."""
        try:
            name = self._store.get(f"{self._prefix}begun/{rank}", max(begin_s - time.monotonic(), 0.0))
        except DeadlineExceeded:
            found.absent.append(rank)
            return
        try:
            data = self._store.get(f"{self._prefix}{rank}", max(deadline_s - time.monotonic(), 0.0))
        except DeadlineExceeded:
            found.unfinished.append(rank)
            so_far = Path(name.decode())
            if is_new(so_far):  # else it is on another host
                found.parts.append(so_far)
            return
        try:
            self._take(rank, data, directory, is_new, found)
        except (OSError, zlib.error) as error:
            found.troubles.append(f"the part of rank {rank}: {error}")

    def _take(self, rank: int, data: bytes, directory: Path, is_new: Callable[[Path], bool], found: Collected) -> None:
        where, _, packed = data.partition(b"\0")
        path, answer = Path(where.decode()), Taken.READ
        # The rank of another host may have written into this very directory, if the hosts share a file system.
        if packed and not (path.parent == directory and is_new(path)):
            path, answer = part_of(directory, rank), Taken.COPIED
            path.write_bytes(zlib.decompress(packed))
        found.parts.append(path)
        self._store.set(f"{self._answers}{rank}", answer.value)
