"""Shows the lines of many streams in one place, each whole and with its rank; it reads from nobody."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Lines", "Screen", "coloured", "file_writer", "stream_writer"]

_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_BYTES = 1 << 16  # of a line that does not end: more is shown in pieces
_COLOURS = (36, 33, 32, 35, 34, 31)

Piece = tuple[
    bytes, bytes
]  # text, and what ended it: b"\n", b"\r" (a line that is to be overwritten), b"" (nothing yet)


class Lines:
    """Cuts a stream of bytes into lines and keeps what has not ended. Any bytes will do."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, data: bytes) -> list[Piece]:
        """The lines that ``data`` completes."""
        text = self._kept + data
        pieces: list[Piece] = []
        begin = 0
        for end in _END.finditer(text):
            if end.group() == b"\r" and end.end() == len(text):
                break  # may be half of \r\n
            pieces.append((text[begin : end.start()], b"\r" if end.group() == b"\r" else b"\n"))
            begin = end.end()
        self._kept = text[begin:]
        return pieces + self.rest() if len(self._kept) > _LONGEST_BYTES else pieces

    def rest(self) -> list[Piece]:
        """What has not ended, given out as it is: a prompt, a progress bar, the last line of a stream."""
        kept, self._kept = self._kept, b""
        if kept.endswith(b"\r"):
            return [(kept[:-1], b"\r")]
        return [(kept, b"")] if kept else []

    @property
    def pending(self) -> bool:
        return bool(self._kept)


class Screen:
    """A terminal, file, pipe or notebook that several streams share. One thread uses it.

    A line that one stream has begun is ended before another's is shown. On a terminal a carriage
    return lets a stream overwrite its own line; elsewhere each such line is kept.
    """

    def __init__(self, write: Callable[[bytes], None], *, is_terminal: bool = False, colour: bool = False) -> None:
        self._write = write
        self._is_terminal = is_terminal
        self._colour = colour
        self._open: object = None  # whose line the cursor is in
        self._at_start = False  # of that line: it can be overwritten
        self.broken = False  # nobody reads any more

    def prefix(self, rank: int, stamp: str = "") -> bytes:
        """``[3] ``, coloured by rank on a terminal."""
        text = f"{stamp}[{rank}]"
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m ".encode() if self._colour else f"{text} ".encode()

    def show(self, owner: object, pieces: list[Piece], prefix: bytes = b"") -> None:
        """Writes ``pieces`` of the stream ``owner``, each line after ``prefix``."""
        out = bytearray()
        for text, end in pieces:
            goes_on = self._open is not None and self._open == owner and not self._at_start
            if not text and end == b"\r" and not goes_on:
                continue  # a bar that begins by returning to the start of its line
            if self._open is not None and self._open != owner:
                out += b"\n"
                self._open = None
            out += text if goes_on else prefix + text
            returns = end == b"\r" and self._is_terminal
            out += b"\r" if returns else b"\n" if end else b""
            self._open = owner if returns or not end else None
            self._at_start = returns
        self._put(out)

    def end_line(self, owner: object = None) -> None:
        """Ends the line that ``owner`` (None: anybody) has begun."""
        if self._open is not None and owner in (None, self._open):
            self._open = None
            self._put(b"\n")

    def _put(self, out: bytes | bytearray) -> None:
        if not out or self.broken:
            return
        try:
            self._write(bytes(out))
        except (OSError, ValueError):  # the reader has gone, or the stream is closed: the job goes on without
            self.broken = True


def coloured(environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Whether to colour: on a terminal that can, unless NO_COLOR is set."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


def file_writer(fd: int) -> Callable[[bytes], None]:
    """Writes all of its bytes to ``fd``, also where somebody has made that non-blocking."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                select.select([], [fd], [], 1.0)

    return write


def stream_writer(stream: Any) -> Callable[[bytes], None]:
    """Writes to a Python stream such as sys.stdout; a notebook's has no bytes, so there they become text."""
    raw = getattr(stream, "buffer", None)

    def write(data: bytes) -> None:
        if raw is not None:
            stream.flush()
            raw.write(data)
            raw.flush()
        else:
            stream.write(data.decode("utf-8", "replace"))
            stream.flush()

    return write
