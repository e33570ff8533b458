"""Bring the ranks' parts of a timeline to the first rank through the job's store, if no launcher of ddl collects them."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from ddlcore.contracts.store import Store
from ddlcore.errors import DdlInternalError
from ddlcore.observe.timeline_parts import part_of

BEGIN_S = 2.0  # for the other ranks to begin the timeline that one rank has already ended


class PartExchange:
    """The exchange of the parts of one timeline. ``number`` is that of the timeline among those of the ranks."""

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._prefix = f"timeline/{number}/"

    def announce(self, rank: int, name: str) -> None:
        """Tell the other ranks that ``rank`` records into a file that is called ``name``. Errors are ignored."""
        with contextlib.suppress(DdlInternalError):  # without the store, no part can be sent in the end
            self._store.set(f"{self._prefix}begun/{rank}", name.encode())

    def announced(self, rank: int, timeout_s: float) -> str:
        """Return the name of the file into which ``rank`` records, as soon as it is known; "" after ``timeout_s`` seconds."""
        try:
            return self._store.get(f"{self._prefix}begun/{rank}", timeout_s).decode()
        except DdlInternalError:
            return ""

    def send(self, rank: int, path: Path, shared: bool) -> None:
        """Send the part of ``rank`` to the first rank: the content of the file ``path``.

        If ``shared`` is true, the first rank can read the file directly, so only its end is told. Errors are ignored.
        """
        with contextlib.suppress(DdlInternalError, OSError):  # if the first rank has ended, it does not need the part
            self._store.set(f"{self._prefix}{rank}", b"" if shared else zlib.compress(path.read_bytes(), 1))

    def collect(
        self, ranks: Iterable[int], shared: Iterable[int], directory: Path, timeout_s: float
    ) -> tuple[list[Path], list[int], list[int]]:
        """Wait for the parts of ``ranks``, and return the paths of the parts that have arrived, in ``directory``.

        The ranks ``shared`` write into this directory themselves, so that there is a part also of one that has not ended
        its timeline. Also return the ranks that have not ended it, and those that have not begun it. The first rank
        calls this. The whole wait takes about ``timeout_s`` seconds at most, and less for ranks that have not begun.
        """
        parts: list[Path] = []
        unfinished: list[int] = []
        absent: list[int] = []
        here = set(shared)
        deadline_s = time.monotonic() + timeout_s
        begin_s = min(deadline_s, time.monotonic() + BEGIN_S)
        for rank in ranks:
            name = self.announced(rank, max(begin_s - time.monotonic(), 0.0))
            if not name:
                absent.append(rank)
                continue
            try:
                data = self._store.get(f"{self._prefix}{rank}", max(deadline_s - time.monotonic(), 0.0))
                path = directory / name
                if data:
                    path = part_of(directory, rank)
                    path.write_bytes(zlib.decompress(data))
                parts.append(path)
            except (DdlInternalError, OSError, zlib.error):
                unfinished.append(rank)
                if rank in here:
                    parts.append(directory / name)
        with contextlib.suppress(DdlInternalError):
            self._store.delete(self._prefix)
        return parts, unfinished, absent
