"""Finds the period of a training loop: the multiset of tensors that comes again, in whatever order.

Pure: it is told what was decided, in the order in which it became ready on the slowest rank, and
answers with the period when it has seen enough of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Occurrence", "PeriodDetector", "TensorKey", "segments"]

HISTORY = 8192  # occurrences remembered for loops without names
LONGEST = 32768  # occurrences: a longer period is not looked for, so that loops of ever new names fill no memory
LEAST_CLEAN = 2
MOST_CLEAN = 64
HELD_LONG = 8  # a schedule that held for so many times the periods of its proof has paid for it
WIDTH = 4  # bytes of the number that stands for a call without a name
LIKE_THE_LAST = 64  # how many earlier calls like the last may have ended the period before, in a loop without names
MOST_CANDIDATES = 16


class TensorKey(NamedTuple):
    """What makes two occurrences the same: an anonymous call has no name, and is known by its spec.

    A tuple, not a dataclass: it is hashed and compared thousands of times a step, which a tuple does in C.
    """

    set_id: int
    name: str  # "" of an anonymous call
    spec: bytes


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One tensor that was decided."""

    key: TensorKey
    bucket: int  # index of the bucket it ran in
    stamp: int  # the last bucket that the user's code on any member had seen end before it asked


def segments(period: Sequence[Occurrence]) -> list[list[Occurrence]]:
    """``period`` cut before each tensor that some rank asked for after it had seen one of the same segment end."""
    cut: list[list[Occurrence]] = []
    first = -1  # the earliest bucket of the present segment
    for one in period:
        if not cut or one.stamp >= first:
            cut.append([])
            first = one.bucket
        cut[-1].append(one)
        first = min(first, one.bucket)
    return cut


@dataclass
class _Candidate:
    """A window's contents that may be the period."""

    content: Counter[TensorKey]
    length: int  # of the window
    clean: int = 0  # windows of just these contents, none that contradicts them in between


class PeriodDetector:
    """Watches discovery. ``needed`` clean windows, then one more to its end, make a schedule.

    A window is closed by a named tensor that occurs a second time. What comes in between, and has
    nothing in common with a candidate (an evaluation), neither proves nor refutes it; nor does a
    window that holds all of it and something else (a metric every few steps). Where nothing has a
    name, the shortest repetition of the exact sequence counts.
    """

    def __init__(self, needed: int = LEAST_CLEAN) -> None:
        self.needed = needed
        self._window: list[Occurrence] = []
        self._names: set[TensorKey] = set()
        self._cuts: list[int] = []  # where in the window a segment begins
        self._segment = -1  # first bucket of the present segment
        self._partial = True  # the window may have begun in the middle of a period
        self._candidates: list[_Candidate] = []  # the one that was seen last stands last
        self._history = bytearray()  # of calls without names, WIDTH bytes each
        self._numbers: dict[TensorKey, bytes] = {}
        self._ends: dict[TensorKey, deque[int]] = {}  # where in the history the latest of each kind end

    def pause(self) -> None:
        """A schedule is replayed from now on: what it does is not seen, and proof of other periods stands."""
        self._begin([])
        self._partial = True
        self._forget_sequence()

    def reset(self) -> None:
        """Something broke the rhythm: what was seen counts no more."""
        self.pause()
        self._candidates = []

    def _forget_sequence(self) -> None:
        if self._history:
            self._history = bytearray()
            self._numbers = {}
            self._ends = {}

    def divergence(self, held: int) -> None:
        """A schedule was left because it did not fit, after ``held`` periods.

        More proof is asked for next time; the least, if this one had held for long.
        """
        long = held >= HELD_LONG * self.needed
        self.needed = LEAST_CLEAN if long else min(2 * self.needed, MOST_CLEAN)
        self.reset()

    def observe(self, occurrence: Occurrence) -> list[Occurrence] | None:
        """The period, if with this occurrence one has just ended that is proven; the next begins after it."""
        key = occurrence.key
        if key.name and key in self._names:
            self._close()
        elif len(self._window) >= LONGEST:
            self.pause()  # nothing came again in all that: it is no candidate
        self._append(occurrence)
        if key.name:
            self._forget_sequence()
        elif not self._names:
            return self._nameless(key)
        if not self._is_proven():
            return None
        if self._cuts and self._cuts[0] > 0:
            # It begins amid tensors that are under way together, and a bucket cannot begin there.
            self._begin(self._window[self._cuts[0] :])
            return None
        found = self._window
        self._begin([])
        return found

    def _begin(self, window: list[Occurrence]) -> None:
        """A new window, which holds ``window``: the end of the present one."""
        dropped = len(self._window) - len(window)
        self._cuts = [cut - dropped for cut in self._cuts if cut >= dropped] if window else []
        self._window = window
        self._names = {one.key for one in window if one.key.name}
        self._partial = False

    def _append(self, occurrence: Occurrence) -> None:
        if occurrence.stamp >= self._segment:
            self._segment = occurrence.bucket
            self._cuts.append(len(self._window))
        self._window.append(occurrence)
        if occurrence.key.name:
            self._names.add(occurrence.key)

    def _is_proven(self) -> bool:
        """Whether the window is a period to its end."""
        proven = [
            candidate
            for candidate in self._candidates
            if candidate.clean >= self.needed and candidate.length == len(self._window)
        ]
        return bool(proven) and Counter(one.key for one in self._window) in [candidate.content for candidate in proven]

    def _close(self) -> None:
        content = Counter(one.key for one in self._window)
        same = _Candidate(content, len(self._window))
        for candidate in self._candidates:
            if candidate.content == content:
                same = candidate
            elif candidate.content.keys() & content.keys() and not self._partial and not candidate.content <= content:
                candidate.clean = 0
        same.clean += 1
        others = [candidate for candidate in self._candidates if candidate is not same]
        self._candidates = [*others[-MOST_CANDIDATES + 1 :], same]
        self._begin([])

    def _nameless(self, key: TensorKey) -> list[Occurrence] | None:
        """The shortest tail that stands ``needed`` + 1 times at the end of the sequence.

        The period before ended with a call like the last: only the latest of those are looked at.
        """
        self._history += self._numbers.setdefault(key, len(self._numbers).to_bytes(WIDTH, "little"))
        end = len(self._history)
        ends = self._ends.setdefault(key, deque(maxlen=LIKE_THE_LAST))
        length = next((end - before for before in reversed(ends) if self._repeats(end - before)), 0)
        ends.append(end)
        if length:
            found = self._window[-(length // WIDTH) :]
            self._begin([])
            self._forget_sequence()
            return found
        if end > HISTORY * WIDTH:  # what is longer than that is not looked for
            self._begin([])
            self._forget_sequence()
        return None

    def _repeats(self, nbytes: int) -> bool:
        """Whether the last ``nbytes`` stand ``needed`` + 1 times at the end: that is like itself, moved by one."""
        begin = len(self._history) - (self.needed + 1) * nbytes
        if begin < 0:
            return False
        with memoryview(self._history) as view:
            return view[begin:-nbytes] == view[begin + nbytes :]
