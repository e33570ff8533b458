"""Read the output of the ranks, and write it to the screen and to files, in a separate thread.

The thread that watches the ranks must not do this: a write blocks if the program that reads ddl's output is slow, and
that thread would then notice the death of a rank too late.
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
from ddlcore.launch.output.screen import LineSplitter, Screen
from ddlcore.launch.output.tracebacks import Tracebacks, error_of, unmarked
from ddlcore.text.ranks import span

LAST_LINES = 20
_LONGEST_KEPT = 500  # limit for the characters of a line that is kept for the summary
_PARTIAL_S = 0.2  # an incomplete line is shown after this time
_READ_BYTES = 1 << 16
_LEFT_BYTES = 4 << 20  # limit for reading at the end, more than a pipe holds: another process may write without end
_STREAMS = ("stdout", "stderr")


def rank_directory(directory: Path, rank: int, size: int) -> Path:
    """Return the directory for the output of ``rank`` below ``directory``, such as ``rank.07`` if ``size`` is 12.

    The name has leading zeros, so that the names of all ranks sort in the order of the ranks.
    """
    return directory / f"rank.{rank:0{len(str(size - 1))}d}"


@dataclass
class _Stream:
    rank: int
    name: str
    screen: Screen
    fd: int  # descriptor of the pipe; below 0: there is no pipe, and the data is passed to `feed`
    file: int = -1  # descriptor of the file below --output-dir; -1: none
    lines: LineSplitter = field(default_factory=LineSplitter)
    since_s: float = 0.0  # time at which the incomplete line was begun
    begun: str = ""  # the part of the incomplete line that was already shown


class Output:
    """The part of the launcher that shows the output of ``size`` ranks and writes it to files.

    One thread creates this object, adds the streams and starts it. Any thread may call ``say`` and ``feed``.
    """

    def __init__(
        self,
        screens: tuple[Screen, Screen],
        size: int,
        *,
        directory: Path | None = None,
        stamped: bool = False,
        verbose: bool = False,
    ) -> None:
        """Prepare to show the output of ``size`` ranks on ``screens``, the screens for stdout and stderr.

        The output is also written to files in ``directory``; None means that there are no files. If ``stamped`` is
        true, each line begins with the time. If ``verbose`` is true, tracebacks that report only the loss of another
        rank or Ctrl-C are shown in full.
        """
        self._tracebacks = Tracebacks(size, verbose)
        self._wrote: set[int] = set()
        self._out, self._err = screens
        self._size = size
        self._directory = directory
        self._stamped = stamped
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._said: deque[str] = deque()
        self._fed: deque[tuple[int, str, bytes, Callable[[], None]]] = deque()
        self._again: deque[tuple[int, int, int]] = deque()
        self._later: set[tuple[int, str]] = set()
        self._remote_streams: dict[tuple[int, str], _Stream] = {}
        self._last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in range(size)]
        self._streams: list[_Stream] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ddl-output", daemon=True)

    def add(self, rank: int, stdout: int, stderr: int) -> None:
        """Register the pipes of ``rank``, which runs on this host. This object will read and close the pipes.

        ``stdout`` and ``stderr`` are the file descriptors of the reading ends. Call this before ``start``.
        """
        for name, fd in zip(_STREAMS, (stdout, stderr), strict=True):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, self._begun(rank, name, fd))

    def add_again(self, rank: int, stdout: int, stderr: int) -> None:
        """Register the pipes of a new process of ``rank``, whose earlier process has ended.

        Unlike ``add``, this may be called after ``start``, by any thread.
        """
        self._again.append((rank, stdout, stderr))
        self._wake.set()

    def add_fed(self, rank: int) -> None:
        """Register ``rank``, whose output will be passed to ``feed``. Call this before ``start``."""
        for name in _STREAMS:
            self._remote_streams[rank, name] = self._begun(rank, name, -2 * rank - 1 - _STREAMS.index(name))

    def add_fed_later(self, rank: int) -> None:
        """Register ``rank``, whose output will be passed to ``feed``, while the job already runs.

        Unlike ``add_fed``, this may be called after ``start``, by any thread.
        """
        for name in _STREAMS:
            self._later.add((rank, name))

    def feed(self, rank: int, name: str, data: bytes, shown: Callable[[], None]) -> None:
        """Pass ``data``, output of ``rank`` on another host, to the output thread, without waiting.

        ``name`` is the stream to which the rank wrote ``data``: "stdout" or "stderr". If ``data`` is empty, the stream
        has ended. The output thread calls ``shown`` once ``data`` has been shown and no longer uses memory. Any thread
        may call this.
        """
        self._fed.append((rank, name, data, shown))
        self._wake.set()

    def _begun(self, rank: int, name: str, fd: int, goes_on: bool = False) -> _Stream:
        file = -1
        if self._directory is not None:
            path = rank_directory(self._directory, rank, self._size) / name
            how = os.O_APPEND if goes_on else os.O_TRUNC
            file = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        stream = _Stream(rank, name, self._out if name == _STREAMS[0] else self._err, fd, file)
        self._streams.append(stream)
        return stream

    def start(self) -> None:
        self._selector.register(self._wake.fileno(), selectors.EVENT_READ)
        self._thread.start()

    def say(self, text: str) -> None:
        """Show ``text``, a message of the launcher itself, on stderr, without waiting. Any thread may call this."""
        self._said.append(text)
        self._wake.set()

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines that ``rank`` wrote to stdout and stderr, in the order of their arrival.

        If these lines contain a traceback, return only its exception and the lines after it, because the whole
        traceback was already shown on the screen.
        """
        lines = list(self._last[rank])
        if rank not in self._tracebacks.seen:
            return lines
        return error_of([unmarked(rank, line.encode()).decode() for line in lines])

    def wrote(self, rank: int) -> bool:
        """Return whether ``rank`` wrote any output. A progress bar or a prompt counts as output."""
        return rank in self._wrote

    def drain(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Show all output that is left in the pipes of the ranks, which have ended, and end the output thread.

        If the screen is slow, wait for it until ``give_up()`` is true. Do not wait for processes that keep a pipe open
        after their rank has ended.
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
            self._take_again()
            self._take_fed()
            self._show_partial()
            self._show_tracebacks()
            self._show_said()
        self._take_again()
        self._take_fed()
        for stream in list(self._streams):
            left = _LEFT_BYTES if stream.fd >= 0 else 0
            while left > 0 and (got := self._read(stream)):
                left -= got
            if stream in self._streams:
                self._close(stream)
        self._show_tracebacks(over=True)
        self._show_said()
        self._selector.close()
        self._wake.close()

    def _patience_s(self) -> float | None:
        now_s = time.monotonic()
        begun = [stream.since_s + _PARTIAL_S - now_s for stream in self._streams if stream.lines.pending]
        held_s = self._tracebacks.patience_s(now_s)
        return (
            max(0.0, min([*begun, *([held_s] if held_s is not None else [])])) if begun or held_s is not None else None
        )

    def _read(self, stream: _Stream) -> int:
        """Read the data that ``stream`` has now, show it, and return the number of its bytes.

        0 means that the stream has ended or that there is no data now.
        """
        try:
            data = os.read(stream.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        self._take(stream, data)
        return len(data)

    def _take_again(self) -> None:
        while self._again:
            rank, *fds = self._again.popleft()
            for name, fd in zip(_STREAMS, fds, strict=True):
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ, self._begun(rank, name, fd, goes_on=True))

    def _take_fed(self) -> None:
        while self._fed:
            rank, name, data, shown = self._fed.popleft()
            stream = self._remote_streams.get((rank, name))
            closed = (rank, name) in self._later if stream is None else stream not in self._streams
            if closed and data:  # another process of the rank writes
                fd = -2 * rank - 1 - _STREAMS.index(name)
                stream = self._remote_streams[rank, name] = self._begun(rank, name, fd, goes_on=True)
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
        self._wrote.add(stream.rank)
        self._note(stream, pieces)
        if stream.name == _STREAMS[1]:
            pieces = self._tracebacks.take(stream.rank, pieces, time.monotonic())
        if pieces:
            stream.screen.show(stream.fd, pieces, stream.screen.prefix(str(stream.rank), self._stamp()))

    def _show_tracebacks(self, over: bool = False) -> None:
        for ranks, pieces in self._tracebacks.due(time.monotonic(), over):
            owner = object()  # a new stream for each traceback: no later text continues an incomplete last line
            self._err.show(owner, pieces, self._err.prefix(span(ranks), self._stamp()))
            self._err.end_line(owner)

    def _stamp(self) -> str:
        return datetime.now().isoformat(timespec="milliseconds") + " " if self._stamped else ""

    def _note(self, stream: _Stream, pieces: list[tuple[bytes, bytes]]) -> None:
        """Keep the last lines of ``pieces``, text that a rank wrote to ``stream``, for the summary of a failure."""
        if len(pieces) > LAST_LINES + 1:
            stream.begun = ""  # this is the beginning of a line that is not among the last lines
        for text, end in pieces[-LAST_LINES - 1 :]:
            stream.begun = (stream.begun + text[: _LONGEST_KEPT + 1].decode("utf-8", "replace"))[: _LONGEST_KEPT + 1]
            if end == b"\r":
                stream.begun = ""  # the next text overwrites this line
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
        if stream.name == _STREAMS[1]:
            self._tracebacks.end(stream.rank, time.monotonic())
        stream.screen.end_line(stream.fd)
        self._remember(stream)
        if stream.fd >= 0:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
        if stream.file >= 0:
            os.close(stream.file)
            stream.file = -1
        self._streams.remove(stream)
