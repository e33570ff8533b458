"""Finds the period of a training loop: the multiset of tensors that comes again, in whatever order.

Pure: it is told what was decided, in the order in which it became ready on the slowest rank, and
answers with the period when it has seen enough of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Occurrence", "PeriodDetector", "TensorKey"]

HISTORY = 8192  # occurrences remembered for loops without names
LONGEST = 32768  # occurrences: a longer period is not looked for, so that loops of ever new names fill no memory
MOST_CLEAN = 64


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
    batch: int  # index of the batch it ran in
    stamp: int  # the last batch that the user's code on any member had seen end before it asked


class PeriodDetector:
    """Watches discovery. ``needed`` equal periods in a row, then one more to its end, make a schedule.

    A window is closed by a named tensor that occurs a second time. Where nothing has a name, the
    shortest repetition of the exact sequence counts.
    """

    def __init__(self, needed: int = 2) -> None:
        self.needed = needed
        self._window: list[Occurrence] = []
        self._names: set[TensorKey] = set()
        self._last: Counter[TensorKey] | None = None  # of the window before
        self._length = 0  # of the window before
        self._clean = 0  # equal windows in a row
        self._history: list[TensorKey] = []

    def reset(self) -> None:
        """Something broke the rhythm: what was seen counts no more."""
        self._window = []
        self._names = set()
        self._last = None
        self._length = 0
        self._clean = 0
        self._history = []

    def divergence(self) -> None:
        """A schedule was left because it did not fit: more proof is asked for next time."""
        self.needed = min(2 * self.needed, MOST_CLEAN)
        self.reset()

    def observe(self, occurrence: Occurrence) -> list[Occurrence] | None:
        """The period, if with this occurrence one has just ended that is proven; the next begins after it."""
        key = occurrence.key
        if key.name and key in self._names:
            self._close()
        elif len(self._window) == LONGEST:
            self.reset()
        self._window.append(occurrence)
        if key.name:
            self._names.add(key)
            if len(self._history) != 0:
                self._history = []
        elif not self._names:
            return self._nameless(occurrence)
        if self._clean >= self.needed and len(self._window) == self._length:
            found = self._window
            if Counter(one.key for one in found) == self._last:
                self._window, self._names = [], set()
                return found
        return None

    def _close(self) -> None:
        counted = Counter(one.key for one in self._window)
        self._clean = self._clean + 1 if counted == self._last else 1
        self._last = counted
        self._length = len(self._window)
        self._window, self._names = [], set()

    def _nameless(self, occurrence: Occurrence) -> list[Occurrence] | None:
        """The shortest tail that stands ``needed`` + 1 times at the end of the sequence."""
        history = self._history
        history.append(occurrence.key)
        if len(history) > HISTORY:
            del history[: HISTORY // 2]
        times = self.needed + 1
        for period in range(1, len(history) // times + 1):
            if history[-1] != history[-1 - period]:
                continue
            tail = history[-period:]
            if all(history[-period * (i + 1) : len(history) - period * i] == tail for i in range(1, times)):
                found = self._window[-period:]
                self._window, self._history = [], []
                return found
        return None
