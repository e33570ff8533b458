"""Finds the period of a training loop: the multiset of tensors that is requested again and again, in any order.

The caller reports each tensor that the coordinator decided on, in the order in which the tensors became ready on the
slowest rank. When there were enough repetitions, the period is returned. This module uses no thread, no lock and no
clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

HISTORY = 8192  # the number of occurrences that are remembered for loops without names
LONGEST = 32768  # occurrences in the longest period; a limit, since loops with ever new names must not fill the memory
LEAST_CLEAN = 2
MOST_CLEAN = 64
HELD_LONG = 8  # a schedule that held for so many times its proof's periods was worth the proof
WIDTH = 4  # bytes of the number that represents a call without a name
LIKE_THE_LAST = 64  # in a loop without names: at how many earlier calls like the last one a period may have ended
MOST_CANDIDATES = 16


class TensorKey(NamedTuple):
    """The identity of a tensor from step to step. A call without a name is recognized by its spec.

    This class is a tuple, not a dataclass, because keys are hashed and compared thousands of times per step, and a
    tuple does that in C.
    """

    set_id: int
    name: str  # "" for an anonymous call
    spec: bytes


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One decision to run one tensor: the key of the tensor, and the bucket in which the tensor ran."""

    key: TensorKey
    bucket: int  # the index of the bucket in which it ran
    stamp: int  # the last bucket whose end the user's code on any member had seen before asking


def segments(period: Sequence[Occurrence]) -> list[list[Occurrence]]:
    """Cut ``period`` into segments, and return them. The tensors of a segment do not depend on each other.

    A tensor begins a new segment if its operation may depend on the result of a tensor of the present segment. This is
    so if at least one rank saw that result before it asked for this tensor.
    """
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
    """The contents of a window (see PeriodDetector) that may turn out to be the period."""

    content: Counter[TensorKey]
    length: int  # the number of occurrences in the window
    clean: int = 0  # windows with exactly these contents, without a contradicting one in between


class PeriodDetector:
    """Watches which tensors are decided in negotiation, and finds the period.

    A window is the list of tensors that were decided since the last period or repetition. A named tensor that occurs a
    second time ends the window. The contents of an ended window are a candidate for the period. If ``needed`` windows
    have had exactly these contents, the candidate is proven, and the next window with them is the period. If a window
    has no tensor of a candidate (for example an evaluation), it neither proves nor refutes that candidate. The same is
    true for a window that contains all tensors of the candidate and further ones (for example a metric every few
    steps). If no tensor has a name, the period is the shortest sequence that is repeated exactly.
    """

    def __init__(self, needed: int = LEAST_CLEAN) -> None:
        self.needed = needed
        self._window: list[Occurrence] = []
        self._names: set[TensorKey] = set()
        self._cuts: list[int] = []  # the indexes in the window at which segments begin
        self._segment = -1  # the first bucket of the present segment
        self._partial = True  # the window may have begun in the middle of a period
        self._candidates: list[_Candidate] = []  # the one that was seen last is at the end
        self._history = bytearray()  # the calls without names, WIDTH bytes for each
        self._numbers: dict[TensorKey, bytes] = {}
        self._ends: dict[TensorKey, deque[int]] = {}  # for each key, where in the history its latest calls end

    def pause(self) -> None:
        """Drop the present window, because a schedule is replayed from now on. Keep the candidates and their proof."""
        self._begin([])
        self._partial = True
        self._forget_sequence()

    def reset(self) -> None:
        """Forget all candidates for the period, and how often each one has repeated, because the loop has changed."""
        self.pause()
        self._candidates = []

    def _forget_sequence(self) -> None:
        if self._history:
            self._history = bytearray()
            self._numbers = {}
            self._ends = {}

    def divergence(self, held: int) -> None:
        """Require more repetitions before the next period is proven, because a schedule that did not fit was left.

        ``held`` is the number of periods for which that schedule was replayed. If this number is large, the lowest
        number of repetitions is required again instead.
        """
        long = held >= HELD_LONG * self.needed
        self.needed = LEAST_CLEAN if long else min(2 * self.needed, MOST_CLEAN)
        self.reset()

    def observe(self, occurrence: Occurrence) -> list[Occurrence] | None:
        """Add one occurrence to the window. If a proven period ends with it, return that period; otherwise None.

        The next period then begins with the next occurrence.
        """
        key = occurrence.key
        if key.name and key in self._names:
            self._close()
        elif len(self._window) >= LONGEST:
            self.pause()  # nothing was repeated in all that, so it is no candidate
        self._append(occurrence)
        if key.name:
            self._forget_sequence()
        elif not self._names:
            return self._nameless(key)
        if not self._is_proven():
            return None
        if self._cuts and self._cuts[0] > 0:
            # The window begins among tensors that are in flight together, which may share a bucket. A period must not
            # separate them, so it can only begin at a segment.
            self._begin(self._window[self._cuts[0] :])
            return None
        found = self._window
        self._begin([])
        return found

    def _begin(self, window: list[Occurrence]) -> None:
        """Replace the present window by a new one, which contains only ``window``.

        ``window`` contains the last occurrences of the present window, or nothing.
        """
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
        """Return whether the contents of the window are equal to a candidate that is proven."""
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
        """Add a call with ``key`` to the history of calls without names, and return the period if one is proven.

        A period is proven if the history ends with ``needed`` + 1 repetitions of it in a row. If there are several such
        periods, return the shortest; if there is none, return None. Each repetition must end with a call with the same
        ``key``. So only the distances to earlier calls with ``key`` are tried as lengths, the shortest first.
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
        if end > HISTORY * WIDTH:  # longer periods are not searched for
            self._begin([])
            self._forget_sequence()
        return None

    def _repeats(self, nbytes: int) -> bool:
        """Return whether the history ends with ``needed`` + 1 repetitions of its last ``nbytes`` bytes.

        The repetitions exist if this end of the history equals itself shifted by ``nbytes``.
        """
        begin = len(self._history) - (self.needed + 1) * nbytes
        if begin < 0:
            return False
        with memoryview(self._history) as view:
            return view[begin:-nbytes] == view[begin + nbytes :]
