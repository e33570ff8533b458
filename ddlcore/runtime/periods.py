"""Finds the period of a training loop: the multiset of tensors that comes again, in whatever order.

Pure: it is told what was decided, in the order in which it became ready on the slowest rank, and
answers with the period when it has seen enough of it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

__all__ = ["Occurrence", "PeriodDetector", "TensorKey"]

HISTORY = 8192  # occurrences remembered for loops without names
LONGEST = 1 << 16  # tensors in a window; names that never come again must not fill the memory
WIDTH = 4  # bytes of the number that stands for a call
CANDIDATES = 64  # how many earlier calls alike may have begun the period of such a loop
LEAST_CLEAN = 2
MOST_CLEAN = 64
HELD_LONG = 8  # a schedule that held so many times the periods that its proof took has paid for it


@dataclass(frozen=True, slots=True)
class TensorKey:
    """What makes two occurrences the same: an anonymous call has no name, and is known by its spec."""

    set_id: int
    name: str  # "" of an anonymous call
    spec: bytes


@dataclass(slots=True)
class Occurrence:
    """One tensor that was decided."""

    key: TensorKey
    batch: int  # index of the batch it ran in; the coordinator fills it in when it has laid out the batch
    stamp: int  # the last batch that the user's code on any member had seen end before it asked


class PeriodDetector:
    """Watches discovery. ``needed`` equal periods in a row, then one more to its end, make a schedule.

    A window is closed by a named tensor that occurs a second time. Where nothing has a name, the
    shortest repetition of the exact sequence counts.
    """

    def __init__(self, needed: int = LEAST_CLEAN) -> None:
        self.needed = needed
        self._window: list[Occurrence] = []
        self._names: set[TensorKey] = set()
        self._last: Counter[TensorKey] | None = None  # what the windows before have in common: they begin with it
        self._before: list[TensorKey] = []  # the window before
        self._clean = 0  # windows alike in a row
        self._history = bytearray()  # of calls without names: WIDTH bytes each, alike for calls alike
        self._numbers: dict[TensorKey, bytes] = {}
        self._seen: dict[TensorKey, deque[int]] = {}  # where in the history the latest of each kind stand

    def reset(self) -> None:
        """Something broke the rhythm: what was seen counts no more."""
        self._window = []
        self._names = set()
        self._last = None
        self._before = []
        self._clean = 0
        self._forget_sequence()

    def _forget_sequence(self) -> None:
        self._history = bytearray()
        self._numbers = {}
        self._seen = {}

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
            self.reset()
        self._window.append(occurrence)
        if key.name:
            self._names.add(key)
            if self._history:
                self._forget_sequence()
        elif not self._names:
            return self._nameless(key)
        if self._clean >= self.needed and self._last is not None and len(self._window) == self._last.total():
            found = self._window
            if Counter(one.key for one in found) == self._last:
                self._window, self._names = [], set()
                return found
        return None

    def _close(self) -> None:
        """A window has ended. It is like the last where one of the two begins with the other.

        So a step in two, or in three, may ask for more than the others: the period is what comes each time.
        """
        keys = [one.key for one in self._window]
        if self._last is not None and Counter(keys[: self._last.total()]) == self._last:
            self._clean += 1
        else:
            counted = Counter(keys)
            self._clean = 2 if counted == Counter(self._before[: len(keys)]) else 1
            self._last = counted
        self._before = keys
        self._window, self._names = [], set()

    def _nameless(self, key: TensorKey) -> list[Occurrence] | None:
        """The shortest tail that stands ``needed`` + 1 times at the end of the sequence.

        It begins behind a call like the last: only the latest of those are tried.
        """
        number = self._numbers.setdefault(key, len(self._numbers).to_bytes(WIDTH, "little"))
        self._history += number
        end = len(self._history)
        ends = self._seen.setdefault(key, deque(maxlen=CANDIDATES))
        found = next((end - other for other in reversed(ends) if self._repeats(end - other)), 0)
        ends.append(end)
        if found:
            period = self._window[-(found // WIDTH) :]
            self._window = []
            self._forget_sequence()
            return period
        if end > HISTORY * WIDTH:
            self._cut(end // 2 // WIDTH * WIDTH)
        return None

    def _repeats(self, period: int) -> bool:
        """Whether the last ``period`` bytes stand ``needed`` + 1 times at the end: compared with itself, moved by one."""
        begin = len(self._history) - (self.needed + 1) * period
        if begin < 0:
            return False
        with memoryview(self._history) as view:
            return view[begin:-period] == view[begin + period :]

    def _cut(self, nbytes: int) -> None:
        """Forgets the first half: a period longer than that is not looked for."""
        if len(self._numbers) > HISTORY:  # shapes that never come back must not fill the memory
            self.reset()
            return
        del self._history[:nbytes]
        del self._window[: nbytes // WIDTH]
        self._seen = {
            key: deque((end - nbytes for end in ends if end > nbytes), CANDIDATES) for key, ends in self._seen.items()
        }
