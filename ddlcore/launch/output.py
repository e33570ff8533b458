"""Moves what the ranks write to the screen and to files, in a thread of its own.

A reader that is slow, or gone, must not delay the news of a rank's death; so nothing here is
done by the thread that watches the ranks.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ddlcore.control.wake import Wake
from ddlcore.launch.screen import Lines, Screen

__all__ = ["LAST_LINES", "Output", "rank_directory"]

LAST_LINES = 20
_LONGEST_KEPT = 500  # characters of a line that is kept for the summary
_PARTIAL_S = 0.2  # after how long a line that has not ended is shown
_READ_BYTES = 1 << 16
_LEFT_BYTES = 4 << 20  # more than a pipe holds: a stranger that goes on writing is not waited for
_STREAMS = ("stdout", "stderr")


def rank_directory(directory: Path, rank: int, size: int) -> Path:
    """``rank.07`` of 12 ranks: sorted by name they are in order."""
    return directory / f"rank.{rank:0{len(str(size - 1))}d}"


@dataclass
class _Stream:
    rank: int
    name: str
    screen: Screen
    fd: int  # below 0: it is fed by the agent of its host
    file: int = -1  # descriptor of this stream's own file
    lines: Lines = field(default_factory=Lines)
    since_s: float = 0.0  # when the line that has not ended was begun
    begun: str = ""  # what was shown of it


class Output:
    """The output of ``size`` ranks. Built, given its streams and started by one thread; ``say`` may come from any."""

    def __init__(
        self, screens: tuple[Screen, Screen], size: int, *, directory: Path | None = None, stamped: bool = False
    ) -> None:
        self._out, self._err = screens
        self._size = size
        self._directory = directory
        self._stamped = stamped
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._said: deque[str] = deque()
        self._fed: deque[tuple[int, str, bytes, Callable[[], None]]] = deque()
        self._remote_streams: dict[tuple[int, str], _Stream] = {}
        self._last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(size)]
        self._streams: list[_Stream] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ddl-output", daemon=True)

    def add(self, rank: int, stdout: int, stderr: int) -> None:
        """Takes over the reading ends of a rank's pipes. Before ``start``."""
        for name, fd in zip(_STREAMS, (stdout, stderr), strict=True):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, self._begun(rank, name, fd))

    def add_fed(self, rank: int) -> None:
        """A rank whose output will come by ``feed``. Before ``start``."""
        for name in _STREAMS:
            self._remote_streams[rank, name] = self._begun(rank, name, -2 * rank - 1 - _STREAMS.index(name))

    def feed(self, rank: int, name: str, data: bytes, shown: Callable[[], None]) -> None:
        """What a rank of another host wrote; b"": its stream has ended. Never waits. Any thread.

        ``shown`` is called, in the thread that shows, when ``data`` needs no memory any more.
        """
        self._fed.append((rank, name, data, shown))
        self._wake.set()

    def _begun(self, rank: int, name: str, fd: int) -> _Stream:
        file = -1
        if self._directory is not None:
            path = rank_directory(self._directory, rank, self._size) / name
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        stream = _Stream(rank, name, self._out if name == _STREAMS[0] else self._err, fd, file)
        self._streams.append(stream)
        return stream

    def start(self) -> None:
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ)
        self._thread.start()

    def say(self, text: str) -> None:
        """Shows the launcher's own words on stderr. Never waits."""
        self._said.append(text)
        self._wake.set()

    def last_lines(self, rank: int) -> list[str]:
        """The last of what ``rank`` wrote, stdout and stderr as they came."""
        return list(self._last[rank])

    def drain(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Shows all that is left in the pipes of ranks that have ended.

        Waits for a screen that is slow, as any program's output does, but no longer once ``give_up``;
        nobody is waited for who holds a pipe open beyond its rank's end.
        """
        self._ending = True
        self._wake.set()
        while self._thread.is_alive() and not give_up():
            self._thread.join(0.1)

    # --- the thread

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    self._wake.clear()
                else:
                    self._read(key.data)
            self._take_fed()
            self._show_partial()
            self._show_said()
        self._take_fed()
        for stream in list(self._streams):
            left = _LEFT_BYTES if stream.fd >= 0 else 0
            while left > 0 and (got := self._read(stream)):
                left -= got
            if stream in self._streams:
                self._close(stream)
        self._show_said()
        self._selector.close()
        self._wake.close()

    def _patience_s(self) -> float | None:
        begun = [stream.since_s for stream in self._streams if stream.lines.pending]
        return max(0.0, min(begun) + _PARTIAL_S - time.monotonic()) if begun else None

    def _read(self, stream: _Stream) -> int:
        """Bytes that were there; 0 at the end, or when there are none now."""
        try:
            data = os.read(stream.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        self._take(stream, data)
        return len(data)

    def _take_fed(self) -> None:
        while self._fed:
            rank, name, data, shown = self._fed.popleft()
            stream = self._remote_streams.get((rank, name))
            if stream is not None and stream in self._streams:
                self._take(stream, data)
            shown()

    def _take(self, stream: _Stream, data: bytes) -> None:
        if not data:
            self._close(stream)
            return
        if stream.file >= 0:
            self._keep(stream, data)
        began = not stream.lines.pending
        pieces = stream.lines.feed(data)
        if began or pieces:
            stream.since_s = time.monotonic()
        self._show(stream, pieces)

    def _keep(self, stream: _Stream, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(stream.file, view) :]
        except OSError as error:
            os.close(stream.file)
            stream.file = -1
            self.say(f"ddl: the {stream.name} of rank {stream.rank} is no longer written to its file: {error.strerror}")

    def _show(self, stream: _Stream, pieces: list[tuple[bytes, bytes]]) -> None:
        if not pieces:
            return
        stamp = datetime.now().isoformat(timespec="milliseconds") + " " if self._stamped else ""
        stream.screen.show(stream.fd, pieces, stream.screen.prefix(stream.rank, stamp))
        if len(pieces) > LAST_LINES + 1:
            stream.begun = ""  # of a line that is none of the last
        for text, end in pieces[-LAST_LINES - 1 :]:
            stream.begun = (stream.begun + text[: _LONGEST_KEPT + 1].decode("utf-8", "replace"))[: _LONGEST_KEPT + 1]
            if end == b"\r":
                stream.begun = ""  # overwritten
            elif end:
                self._remember(stream)

    def _remember(self, stream: _Stream) -> None:
        line, stream.begun = stream.begun, ""
        if line.strip():
            self._last[stream.rank].append(line if len(line) <= _LONGEST_KEPT else line[:_LONGEST_KEPT] + "…")

    def _show_partial(self) -> None:
        now_s = time.monotonic()
        for stream in self._streams:
            if stream.lines.pending and now_s - stream.since_s >= _PARTIAL_S:
                self._show(stream, stream.lines.rest())

    def _show_said(self) -> None:
        while self._said:
            self._err.show(
                self, [(line.encode("utf-8", "backslashreplace"), b"\n") for line in self._said.popleft().splitlines()]
            )

    def _close(self, stream: _Stream) -> None:
        self._show(stream, stream.lines.rest())
        stream.screen.end_line(stream.fd)
        self._remember(stream)
        if stream.fd >= 0:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
        if stream.file >= 0:
            os.close(stream.file)
            stream.file = -1
        self._streams.remove(stream)
