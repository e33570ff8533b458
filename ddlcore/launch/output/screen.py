"""Show the lines of many streams on one screen, each line unbroken and with its rank in front.

A screen is a terminal, file, pipe or notebook. The caller reads the streams.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Mapping
from typing import Any

_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_BYTES = 1 << 16  # a longer line without an end is shown in pieces
_COLOURS = (36, 33, 32, 35, 34, 31)

Piece = tuple[
    bytes, bytes
]  # text, and its end: b"\n", b"\r" (the next text overwrites the line), or b"" (the line is not complete)


class LineSplitter:
    """A splitter that cuts a stream of bytes into lines, and keeps the incomplete last line. Any bytes are allowed."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, data: bytes) -> list[Piece]:
        """Add ``data`` to the stream, and return the lines that are complete now.

        If the incomplete line is longer than 64 KiB, also return this line.
        """
        text = self._kept + data
        pieces: list[Piece] = []
        begin = 0
        for end in _END.finditer(text):
            if end.group() == b"\r" and end.end() == len(text):
                break  # may be the first half of \r\n
            pieces.append((text[begin : end.start()], b"\r" if end.group() == b"\r" else b"\n"))
            begin = end.end()
        self._kept = text[begin:]
        return pieces + self.rest() if len(self._kept) > _LONGEST_BYTES else pieces

    def rest(self) -> list[Piece]:
        """Return the incomplete line, or [] if there is none, and remove it from this splitter.

        An incomplete line may be a prompt, a progress bar, or the last line of a stream.
        """
        kept, self._kept = self._kept, b""
        if kept.endswith(b"\r"):
            return [(kept[:-1], b"\r")]
        return [(kept, b"")] if kept else []

    @property
    def pending(self) -> bool:
        return bool(self._kept)


class Screen:
    """A terminal, file, pipe or notebook that several streams share. Only one thread may use it.

    If one stream has begun a line, the screen ends this line before it shows another stream. On a terminal, a carriage
    return lets a stream overwrite its own line. In a file, pipe or notebook, a carriage return ends the line, so that
    no text is overwritten.
    """

    def __init__(self, write: Callable[[bytes], None], *, is_terminal: bool = False, colour: bool = False) -> None:
        self._write = write
        self._is_terminal = is_terminal
        self._colour = colour
        self._open: object = None  # the stream whose line is incomplete, with the cursor in this line
        self._at_start = False  # the cursor is at the start of that line, which can be overwritten
        self.broken = False  # writing has failed, because the reader is gone or the stream is closed

    def wrapped(self, wrap: Callable[[Callable[[bytes], None]], Callable[[bytes], None]]) -> Screen:
        """Return a screen that writes by ``wrap(write)``, where ``write`` writes to this terminal.

        If this screen is no terminal, return this screen.
        """
        if not self._is_terminal:
            return self
        return Screen(wrap(self._write), is_terminal=True, colour=self._colour)

    def prefix(self, ranks: str, stamp: str = "") -> bytes:
        """Return the prefix for lines of one or several ranks, such as ``[3] `` or ``[0-3] ``.

        ``ranks`` is the text between the brackets. ``stamp`` is the time, which is put in front of the brackets, or "".
        If the screen has colours, the colour of the prefix depends on the first rank.
        """
        text = f"{stamp}[{ranks}]"
        if not self._colour:
            return f"{text} ".encode()
        first = int(re.split(r"\D", ranks, maxsplit=1)[0])
        return f"\x1b[{_COLOURS[first % len(_COLOURS)]}m{text}\x1b[0m ".encode()

    def show(self, owner: object, pieces: list[Piece], prefix: bytes = b"") -> None:
        """Write ``pieces``, which are text of the stream ``owner``, with ``prefix`` in front of each line."""
        out = bytearray()
        for text, end in pieces:
            goes_on = self._open is not None and self._open == owner and not self._at_start
            if not text and end == b"\r" and not goes_on:
                continue  # the carriage return with which a progress bar begins
            if self._open is not None and self._open != owner:
                out += b"\n"
                self._open = None
            out += text if goes_on else prefix + text
            returns = end == b"\r" and self._is_terminal
            out += b"\r" if returns else b"\n" if end else b""
            self._open = owner if returns or not end else None
            self._at_start = returns
        self._put(out)

    def say(self, text: str) -> None:
        """Show ``text``, a message of the launcher, which may have several lines."""
        self.show("ddl", [(line.encode(), b"\n") for line in f"ddl run: {text}".splitlines()])

    def end_line(self, owner: object = None) -> None:
        """If the last line on the screen is incomplete, end this line with a newline.

        If ``owner`` (a stream) is given, do this only if this stream has begun the line.
        """
        if self._open is not None and owner in (None, self._open):
            self._open = None
            self._put(b"\n")

    def _put(self, out: bytes | bytearray) -> None:
        if not out or self.broken:
            return
        try:
            self._write(bytes(out))
        except (OSError, ValueError):  # the reader is gone, or the stream is closed: the job continues without output
            self.broken = True


def coloured(environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Return whether to use colours: only on a terminal that supports colours, and not if NO_COLOR is set."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


def file_writer(fd: int) -> Callable[[bytes], None]:
    """Return a function that writes all bytes of its argument to the file descriptor ``fd``.

    If another program has made ``fd`` non-blocking, the function waits until all bytes can be written.
    """

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                select.select([], [fd], [], 1.0)

    return write


def stream_writer(stream: Any) -> Callable[[bytes], None]:
    """Return a function that writes bytes to ``stream``, a Python stream such as sys.stdout.

    If the stream accepts only text, such as the stream of a notebook, the function decodes the bytes to text.
    """
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
