"""Write one rank's file of a timeline in a separate thread. The file is valid JSON at any time."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from ddl_doctor.recording.ring_buffer import RecordKind, RingBuffer
from ddl_doctor.recording.trace_writer import TraceWriter
from ddlcore.observe.timeline_parts import parts_in
from ddlcore.threads import OwnThread

log = logging.getLogger("ddl")
MADE_HERE = ".ddl-timeline"  # file that marks a directory as created by ddl: other directories are never removed
FLUSH_S = 0.2
CHUNK = 32  # number of records after which a write to the file lets other threads run
CLOCK_S = 10.0  # time between two readings of the coordinator's clock
_END = b"\n]\n"

Clock = Callable[[], "tuple[int, int] | None"]  # offset and error in ns; None: not available now


def parts_beside(file: Path) -> Path:
    """Return the directory in which the ranks write their parts, before the parts are merged into ``file``."""
    return file.with_name(file.name + ".ranks")


def make_directory(directory: Path) -> None:
    """Create ``directory`` for the ranks' files, and mark it as created by ddl.

    An existing directory is not changed. Raises OSError if the directory cannot be created.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        _mark(directory)


def _mark(directory: Path) -> None:
    os.close(os.open(directory / MADE_HERE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


def remove_directory(directory: Path) -> None:
    """Remove the ranks' files from ``directory``, and the directory itself if it contains no other files.

    If ddl did not create the directory, nothing is removed.
    """
    if directory.is_symlink() or not (directory / MADE_HERE).is_file():
        return
    with contextlib.suppress(OSError):
        for path in parts_in(directory):
            path.unlink()
    remove_if_empty(directory)


def remove_if_empty(directory: Path) -> None:
    """Remove ``directory`` if ddl has created it and it contains no files of ranks or of the user."""
    with contextlib.suppress(OSError):
        if [path.name for path in directory.iterdir()] == [MADE_HERE]:
            (directory / MADE_HERE).unlink()
            try:
                directory.rmdir()
            except OSError:  # a rank has begun its next part meanwhile
                _mark(directory)


class TraceFile:
    """A file that contains a JSON list of events. Events can be added at the end of the list.

    After each write, the file contains a complete list, so it can be read at any time.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, and its directory if necessary. Raises OSError if the file cannot be created or exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.path = path
        try:
            make_directory(path.parent)
            self._fd = os.open(path, flags, 0o644)
        except FileNotFoundError:  # another rank has removed the directory, which was empty, at this moment
            make_directory(path.parent)
            self._fd = os.open(path, flags, 0o644)
        self._at = 0  # position of the end of the list
        self._first = True
        os.pwrite(self._fd, b"[" + _END, 0)
        self._at = 1

    def add(self, events: Sequence[str]) -> None:
        """Add ``events``, each a JSON text, by one write that replaces the end of the list.

        The kernel executes the write as a whole, so the list in the file stays complete. It can be incomplete only if
        the process is killed during the write.
        """
        if not events:
            return
        data = ("\n" if self._first else ",\n") + ",\n".join(events)
        self._first = False
        encoded = data.encode()
        whole = encoded + _END
        written = 0
        while written < len(whole):
            written += os.pwrite(self._fd, whole[written:], self._at + written)
        self._at += len(encoded)

    def close(self) -> None:
        """Close the file. Afterwards no event can be added."""
        os.close(self._fd)


class Timeline:
    """A thread that writes the records of ``ring`` to a file at short intervals.

    The thread runs from ``start`` to ``stop``. ``writer`` converts the records to events of the trace.
    """

    def __init__(
        self, ring: RingBuffer, writer: TraceWriter, path: Path, facts: Mapping[str, Any], clock: Clock
    ) -> None:
        """Create the file ``path``. Raises OSError if the file cannot be created or exists.

        ``facts`` describes the recording, and is written at the begin of the file. ``clock`` compares this rank's clock
        with the coordinator's clock.
        """
        self.path = path
        self._ring = ring
        self._writer = writer
        self._facts = dict(facts)
        self._clock = clock
        self._file = TraceFile(path)
        self._stopping = threading.Event()
        self._failed = False
        self._thread = OwnThread(target=self._run, name="ddl-timeline")

    def start(self) -> None:
        """Write the first events, and start the thread."""
        self._add(self._writer.begin(self._facts, perf_counter_ns()))
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the thread write the remaining records and close the file, and wait for it at most ``timeout_s`` seconds.

        Further calls do nothing.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        look_ns = 0
        while True:
            ended = self._stopping.wait(FLUSH_S)
            self._flush()  # before asking for the clock, because the coordinator's answer may take long
            if ended or perf_counter_ns() >= look_ns:
                self._look()
                look_ns = perf_counter_ns() + int(CLOCK_S * 1e9)
            if ended:
                self._flush()
                break
        self._add(self._writer.end(perf_counter_ns(), self._ring.lost))
        self._file.close()

    def _flush(self) -> None:
        records = self._ring.take()
        while chunk := list(islice(records, CHUNK)):
            self._add(self._writer.write(chunk))

    def _look(self) -> None:
        found = self._clock()
        if found is not None:
            self._ring.put(RecordKind.CLOCK, perf_counter_ns(), *found)

    def _add(self, events: Sequence[str]) -> None:
        if self._failed:
            return
        try:
            self._file.add(events)
        except OSError as error:  # a full disk must not end the training
            self._failed = True
            log.warning("timeline: %s: %s; nothing more is written", self.path, error.strerror)
