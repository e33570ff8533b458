"""Show the traceback that several ranks wrote once, and that of a rank which only lost its peers in one line.

It holds back what a rank writes to stderr from the beginning of a traceback until the rank has written nothing for a
moment, and then waits as short a time for other ranks with the same text. It has no clock and no thread of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddlcore.launch.output.screen import Piece

QUIET_S = 0.2  # a traceback is complete when nothing has followed for so long
GATHER_S = 0.4  # how long a complete traceback waits for other ranks with the same one
LONGEST_S = 2.0  # how long a rank that keeps writing is held back at most
_MOST_LINES = 1000  # of one rank; more are not held back

_BEGIN = b"Traceback (most recent call last):"
# Raised on a rank because another one has failed, so the traceback of this one explains nothing.
_SECONDARY = re.compile(rb"ddlcore\.errors\.(?:PeerLost|Closed): ")
_INTERRUPT = b"KeyboardInterrupt"
_FRAME = re.compile(rb'  File "([^"<]+)", line (\d+)')
_LIBRARY = re.compile(rb"[/\\]lib(?:64)?[/\\]python3|[/\\]site-packages[/\\]")
_VERBOSE = b"  (--verbose shows the traceback)"
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(?:: |$)")  # of the kind `module.Name: message`


@dataclass
class Block:
    """What one rank wrote since the beginning of a traceback."""

    rank: int
    since_s: float
    last_s: float
    pieces: list[Piece] = field(default_factory=list)


class Shown(NamedTuple):
    """Text that is ready to be shown, of one or several ranks."""

    ranks: list[int]
    pieces: list[Piece]


class Tracebacks:
    """The tracebacks that are held back. One thread uses it.

    ``verbose``: a traceback of which only one line matters is shown whole.
    """

    def __init__(self, size: int, verbose: bool = False) -> None:
        self._size = size
        self._verbose = verbose
        self._open: dict[int, Block] = {}  # by rank: it may still grow
        self._complete: list[tuple[float, list[int], list[Piece]]] = []  # since when, of which ranks, the text
        self.seen: set[int] = set()  # the ranks that wrote a traceback

    def take(self, rank: int, pieces: list[Piece], now_s: float) -> list[Piece]:
        """Take what ``rank`` has written to stderr, and return what is to be shown of it now."""
        block = self._open.get(rank)
        at = 0
        if block is None:
            at = next((i for i, (text, _) in enumerate(pieces) if text == _BEGIN), len(pieces))
            if at == len(pieces):
                return pieces
            block = self._open[rank] = Block(rank, now_s, now_s)
        for text, end in pieces[at:]:
            if block.pieces and not block.pieces[-1][1]:  # the line was not complete yet
                text = block.pieces.pop()[0] + text
            block.pieces.append((text, end))
        block.last_s = now_s
        self.seen.add(rank)
        return pieces[:at]

    def due(self, now_s: float, over: bool = False) -> list[Shown]:
        """Return what is to be shown now. ``over``: nothing more will be written, so everything is."""
        for block in list(self._open.values()):
            quiet = now_s - block.last_s >= QUIET_S
            if over or quiet or now_s - block.since_s >= LONGEST_S or len(block.pieces) > _MOST_LINES:
                del self._open[block.rank]
                self._finish(block, now_s)
        ready = [one for one in self._complete if over or self._is_due(one, now_s)]
        self._complete = [one for one in self._complete if one not in ready]
        return [Shown(sorted(ranks), pieces) for _, ranks, pieces in ready]

    def end(self, rank: int, now_s: float) -> None:
        """Record that ``rank`` writes no more, so that its traceback is complete."""
        block = self._open.pop(rank, None)
        if block is not None:
            self._finish(block, now_s)

    def patience_s(self, now_s: float) -> float | None:
        """Return in how many seconds ``due`` may have something at the earliest; None if nothing is held back."""
        times = [block.last_s + QUIET_S for block in self._open.values()]
        times += [since_s + GATHER_S for since_s, _, _ in self._complete]
        return max(0.0, min(times) - now_s) if times else None

    def _finish(self, block: Block, now_s: float) -> None:
        pieces = block.pieces if self._verbose else in_short(block.pieces)
        for _, ranks, other in self._complete:
            if _plain(other) == _plain(pieces) and block.rank not in ranks:
                ranks.append(block.rank)
                return
        self._complete.append((now_s, [block.rank], pieces))

    def _is_due(self, complete: tuple[float, list[int], list[Piece]], now_s: float) -> bool:
        since_s, ranks, _ = complete
        return len(ranks) == self._size or now_s - since_s >= GATHER_S


def in_short(pieces: list[Piece]) -> list[Piece]:
    """Return one line, if every traceback in ``pieces`` is only about the failure of another rank, or about Ctrl-C.

    Otherwise, return ``pieces`` as they are. After Ctrl-C, the line says what the script was doing.
    """
    errors: list[bytes] = []
    inside = False  # between the beginning of a traceback and its exception
    where = b""  # the innermost frame that is not of a library
    for text, _ in pieces:
        if text == _BEGIN:
            inside = True
        elif inside and (frame := _FRAME.match(text)):
            where = frame[0].strip() if not _LIBRARY.search(frame[1]) else where
        elif inside and text and not text.startswith(b" "):
            inside = False
            if text != _INTERRUPT and not _SECONDARY.match(text):
                return pieces
            errors.append(text)
        elif not inside and _EXCEPTION.match(text) and b"Error" in text:
            return pieces  # something else went wrong as well
    if inside or not errors:
        return pieces
    said = errors[-1] + (b" in " + where if errors[-1] == _INTERRUPT and where else b"")
    return [(said + _VERBOSE, b"\n")]


def _plain(pieces: list[Piece]) -> bytes:
    return b"\n".join(text for text, _ in pieces).strip()


def error_of(lines: Sequence[str]) -> list[str]:
    """Return the error of the last traceback in ``lines``, and what was written after it.

    ``lines`` may begin inside the traceback. All of them are returned if they contain no error.
    """
    at = 0
    for i, line in enumerate(lines):
        if i and lines[i - 1].startswith(" ") and line and not line.startswith((" ", _BEGIN.decode())):
            at = i
    return list(lines[at:])
