"""Shorten the tracebacks of ranks: if several ranks write the same traceback, show it only once.

If a rank has failed only because it lost another rank, its traceback is shown as one line. To do this, the module keeps
the text that a rank writes to stderr, from the beginning of a traceback until the rank has written no text for 0.2 s.
Then it waits up to 0.4 s for other ranks with the same traceback. If another rank writes the same traceback later, only
one line is shown, which refers to the traceback above. The module reads no clock and starts no thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddlcore.launch.output.screen import Piece

QUIET_S = 0.2  # a traceback is complete when its rank has written no text for so long
GATHER_S = 0.4  # time that a complete traceback waits for other ranks with the same traceback
LONGEST_S = 2.0  # longest time for which the text of a rank that writes without a pause is kept back
_MOST_LINES = 1000  # limit for the lines of one rank that are kept back
_ABOVE_S = 60.0  # for so long, other ranks may refer to a shown traceback; later it may be far above on the screen
_MOST_ABOVE = 32  # number of shown tracebacks that are remembered for such references

_BEGIN = b"Traceback (most recent call last):"
# Errors that a rank raises because another rank has failed, so that the rank's own traceback explains nothing.
_SECONDARY = re.compile(rb"ddlcore\.errors\.(?:PeerLost|Closed): ")
_INTERRUPT = b"KeyboardInterrupt"
_FRAME = re.compile(rb'  File "([^"<]+)", line (\d+)')
_LIBRARY = re.compile(rb"[/\\]lib(?:64)?[/\\]python3|[/\\]site-packages[/\\]")
_DURING = b"During handling of the above exception, another exception occurred:"
_BECAUSE = b"The above exception was the direct cause of the following exception:"
_LINKS = tuple([b"", between, b"", _BEGIN] for between in (_DURING, _BECAUSE))  # between two tracebacks of a chain
_NOTICE = re.compile(rb"Exception ignored |" + _DURING + b"|" + _BECAUSE)  # lines that Python writes before a traceback
_VERBOSE = b"  (--verbose shows the traceback)"
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(?:: |$)")  # a line of the form `module.Name: message`


@dataclass
class Block:
    """The text that one rank has written since the beginning of a traceback that is not complete yet."""

    rank: int
    since_s: float
    last_s: float
    pieces: list[Piece] = field(default_factory=list)


@dataclass(eq=False)
class _Waiting:
    """A complete traceback that waits for other ranks with the same traceback.

    This object also has, for each rank that wrote the traceback, the text that the rank has written after it.
    """

    since_s: float
    head: list[Piece]  # the traceback up to the line with the exception
    rests: dict[int, list[Piece]]  # by rank: the text after the traceback


@dataclass
class _Above:
    """The record of a traceback that was shown on the screen: when, and for which ranks."""

    at_s: float
    ranks: set[int]


class Shown(NamedTuple):
    """Text of one or several ranks that must be shown now."""

    ranks: list[int]
    pieces: list[Piece]


class Tracebacks:
    """The tracebacks of ``size`` ranks. Each traceback is kept back for a short time before it is shown.

    If ``verbose`` is true, tracebacks that report only the loss of another rank or Ctrl-C are shown in full. Only one
    thread may use this object.
    """

    def __init__(self, size: int, verbose: bool = False) -> None:
        self._size = size
        self._verbose = verbose
        self._open: dict[int, Block] = {}  # by rank: a traceback that is not complete yet
        self._waiting: list[_Waiting] = []  # complete tracebacks, in the order in which they were completed
        self._above: dict[tuple[bytes, ...], _Above] = {}  # by their lines: tracebacks that were shown
        self.seen: set[int] = set()  # the ranks that have written a traceback

    def take(self, rank: int, pieces: list[Piece], now_s: float) -> list[Piece]:
        """Handle ``pieces``, which ``rank`` has written to stderr, and return the pieces that must be shown now.

        The other pieces are kept back; ``due`` returns them later.
        """
        block = self._open.get(rank)
        at = 0
        if block is None:
            at = next((i for i, (text, _) in enumerate(pieces) if unmarked(rank, text) == _BEGIN), len(pieces))
            # Text that follows a traceback which still waits is shown after this traceback.
            held = next((one for one in reversed(self._waiting) if rank in one.rests), None)
            direct = pieces[:at]
            if held is not None:
                held.rests[rank] += direct
                direct = []
            if at == len(pieces):
                return direct
            block = self._open[rank] = Block(rank, now_s, now_s)
        else:
            direct = []
        for text, end in pieces[at:]:
            if block.pieces and not block.pieces[-1][1]:  # the line was not complete yet
                text = block.pieces.pop()[0] + text
            block.pieces.append((text, end))
        block.last_s = now_s
        self.seen.add(rank)
        return direct

    def due(self, now_s: float, over: bool = False) -> list[Shown]:
        """Return the texts that were kept back and must be shown now.

        If ``over`` is true, the ranks write no more text, so return all texts that were kept back.
        """
        for block in list(self._open.values()):
            quiet = now_s - block.last_s >= QUIET_S
            if over or quiet or now_s - block.since_s >= LONGEST_S or len(block.pieces) > _MOST_LINES:
                del self._open[block.rank]
                self._finish(block, now_s)
        shown: list[Shown] = []
        for one in list(self._waiting):
            if one in self._waiting and (over or self._is_due(one, now_s)):
                shown += self._release(one, now_s)
        return shown

    def end(self, rank: int, now_s: float) -> None:
        """Record that ``rank`` will write no more text, so that its traceback is complete."""
        block = self._open.pop(rank, None)
        if block is not None:
            self._finish(block, now_s)

    def patience_s(self, now_s: float) -> float | None:
        """Return the time in seconds after which ``due`` may return a text, if the ranks write no more text.

        Return None if no text is kept back.
        """
        times = [block.last_s + QUIET_S for block in self._open.values()]
        times += [one.since_s + GATHER_S for one in self._waiting]
        return max(0.0, min(times) - now_s) if times else None

    def _finish(self, block: Block, now_s: float) -> None:
        pieces = [(unmarked(block.rank, text), end) for text, end in block.pieces]
        short = pieces if self._verbose else in_short(pieces)
        # After Ctrl-C, several threads and processes of a rank may write tracebacks: all of them together become one
        # line.
        parts = [short] if short is not pieces else _apart(pieces)
        for part in parts:
            self._add(block.rank, part if self._verbose else in_short(part), now_s)

    def _add(self, rank: int, pieces: list[Piece], now_s: float) -> None:
        head, rest = _split(pieces)
        # Search only after the last waiting traceback of this rank, so that the rank's tracebacks keep their order.
        begin = max((i + 1 for i, one in enumerate(self._waiting) if rank in one.rests), default=0)
        for one in self._waiting[begin:]:
            if _texts(one.head) == _texts(head):
                one.rests[rank] = rest
                return
        self._waiting.append(_Waiting(now_s, head, {rank: rest}))

    def _is_due(self, one: _Waiting, now_s: float) -> bool:
        return len(one.rests) == self._size or now_s - one.since_s >= GATHER_S

    def _release(self, last: _Waiting, now_s: float) -> list[Shown]:
        """Return the texts of ``last`` and, before them, the texts of earlier waiting tracebacks of the same ranks.

        In this way the lines of each rank keep their order.
        """
        chosen, ranks = [last], set(last.rests)
        for one in reversed(self._waiting[: self._waiting.index(last)]):
            if ranks & one.rests.keys():
                chosen.insert(0, one)
                ranks |= one.rests.keys()
        self._waiting = [one for one in self._waiting if one not in chosen]
        return [shown for one in chosen for shown in self._shown(one, now_s)]

    def _shown(self, one: _Waiting, now_s: float) -> list[Shown]:
        ranks = sorted(one.rests)
        head = self._referring(one.head, ranks, now_s)
        rests = list(one.rests.values())
        if all(_texts(rest) == _texts(rests[0]) for rest in rests):
            return [Shown(ranks, [*head, *rests[0]])]
        return [Shown(ranks, head), *(Shown([rank], one.rests[rank]) for rank in ranks if one.rests[rank])]

    def _referring(self, head: list[Piece], ranks: list[int], now_s: float) -> list[Piece]:
        """Return ``head``, a traceback of ``ranks``, or one line if the same traceback of other ranks was shown before.

        The line has the exception and a reference to the lowest of the other ranks. If the traceback shown before was
        also from one of ``ranks``, the error has happened again, so return the whole ``head``.
        """
        lines = _texts(head)
        self._above = {key: one for key, one in self._above.items() if now_s - one.at_s < _ABOVE_S}
        above = self._above.get(lines)
        if len(head) > 1 and above is not None and above.ranks.isdisjoint(ranks):
            text = b"%s  (the same traceback as rank %d's)" % (lines[-1], min(above.ranks))
            above.ranks |= set(ranks)
            return [(text, b"\n")]
        self._above.pop(lines, None)
        self._above[lines] = _Above(now_s, set(ranks))
        if len(self._above) > _MOST_ABOVE:
            del self._above[next(iter(self._above))]
        return head


def in_short(pieces: list[Piece]) -> list[Piece]:
    """Shorten the tracebacks in ``pieces`` to one line, if all of them report only the loss of another rank or Ctrl-C.

    The result has this line, and then the lines of ``pieces`` that are not part of a traceback. After Ctrl-C, the line
    also names the line of the script that was running. If there is any other traceback, return ``pieces`` unchanged.
    """
    errors: list[bytes] = []
    others: list[Piece] = []
    inside = False  # between the beginning of a traceback and its exception
    where = b""  # the innermost frame that is not of a library
    for text, end in pieces:
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
            return pieces  # there was another error as well
        elif not inside and text and not _NOTICE.match(text):
            others.append((text, end))
    if inside or not errors:
        return pieces
    said = errors[-1] + (b" in " + where if errors[-1] == _INTERRUPT and where else b"")
    return [(said + _VERBOSE, b"\n"), *others]


def unmarked(rank: int, line: bytes) -> bytes:
    """Return ``line`` without a mark such as "[rank1]: ", which a framework may put in front of a rank's lines."""
    return line.removeprefix(b"[rank%d]: " % rank)


def _apart(pieces: list[Piece]) -> list[list[Piece]]:
    """Split ``pieces`` into tracebacks, each with the lines that follow it. A chain of exceptions is not split."""
    parts: list[list[Piece]] = []
    before = b""  # the last line that is not empty
    for piece in pieces:
        if not parts or (piece[0] == _BEGIN and not _NOTICE.match(before)):
            parts.append([])
        parts[-1].append(piece)
        before = piece[0] or before
    return parts


def _split(pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces up to the line with the exception, and the pieces after this line.

    The pieces after this line may begin with further lines of the exception's message.
    """
    texts = [text for text, _ in pieces]
    at = 1 if texts[0] == _BEGIN else 0
    while at < len(texts):
        if texts[at].startswith(b" "):  # a frame, or its source
            at += 1
        elif texts[at + 1 : at + 5] in _LINKS:
            at += 5
        else:
            return pieces[: at + 1], pieces[at + 1 :]
    return pieces, []


def _texts(pieces: Iterable[Piece]) -> tuple[bytes, ...]:
    return tuple(text for text, _ in pieces)


def error_of(lines: Sequence[str]) -> list[str]:
    """Return the exception lines of the last traceback in ``lines``, and all lines after them.

    ``lines`` may begin inside the traceback. If ``lines`` contain no traceback, return all of them.
    """
    at = 0
    for i, line in enumerate(lines):
        if i and lines[i - 1].startswith(" ") and line and not line.startswith((" ", _BEGIN.decode())):
            at = i
    return list(lines[at:])
