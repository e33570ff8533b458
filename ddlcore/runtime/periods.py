"""Finds the period of a training loop: the multiset of tensors that is requested again and again, in any order.

The caller reports each tensor that the coordinator decided on, in the order in which the tensors became ready on the
slowest rank. When there were enough repetitions, the period is returned. This module uses no thread, no lock and no
clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddlcore.runtime.repetitions import Repetitions

LONGEST = 32768  # occurrences in the longest period; a limit, since loops with ever new names must not fill the memory
LEAST_CLEAN = 2
MOST_CLEAN = 64
HELD_LONG = 8  # a schedule that held for so many times its proof's periods was worth the proof
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
    steps). If no tensor has a name, the period is a sequence that is repeated exactly, see ``Repetitions``.
    """

    def __init__(self, needed: int = LEAST_CLEAN) -> None:
        self.needed = needed
        self._window: list[Occurrence] = []
        self._names: set[TensorKey] = set()
        self._cuts: list[int] = []  # the indexes in the window at which segments begin
        self._segment = -1  # the first bucket of the present segment
        self._partial = True  # the window may have begun in the middle of a period
        self._candidates: list[_Candidate] = []  # the one that was seen last is at the end
        self._nameless = Repetitions()
        self._collects = False

    def pause(self) -> None:
        """Drop the present window, because a schedule is replayed from now on. Keep the candidates and their proof."""
        self._begin([])
        self._partial = True

    @property
    def collects(self) -> bool:
        """Whether a period of calls without names is known to be repeated, but not yet how its calls depend on each other.

        Then all calls must be negotiated until the period is returned. So no shorter schedule may be replayed.
        """
        return self._collects

    def replayed(self, keys: Sequence[TensorKey]) -> None:
        """Record the tensors that a schedule of calls without names has replayed before it was left."""
        self._nameless.replayed(keys)

    def interrupted(self) -> None:
        """Forget the calls without names, because calls that this object has not seen came in between."""
        self._nameless.clear()
        self._collects = False

    def reset(self) -> None:
        """Forget all candidates for the period, and how often each one has repeated, because the loop has changed."""
        self.pause()
        self._candidates = []
        self.interrupted()

    def divergence(self, held: int, period: Sequence[TensorKey] = ()) -> None:
        """Require more repetitions before the next period is proven, because a schedule that did not fit was left.

        ``held`` is the number of periods for which that schedule was replayed. If this number is large, the lowest
        number of repetitions is required again instead. ``period`` are the tensors of the schedule.
        """
        long = held >= HELD_LONG * self.needed
        if period and not any(key.name for key in period):
            self.pause()
            self._nameless.doubt(period, long)
            return
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
            self.interrupted()
        elif not self._names:
            return self._repeated(key)
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

    def _repeated(self, key: TensorKey) -> list[Occurrence] | None:
        """Record a call without a name. Return the period that is repeated now, or None.

        Some of the calls of the period may have been replayed as parts of a shorter one. How these depend on each other
        is not known. So the period is returned when all of its calls were negotiated.
        """
        length = self._nameless.add(key)
        self._collects = length > len(self._window)
        if not length or self._collects:
            return None
        found = self._window[-length:]
        self._begin([])
        return found
