"""Finds the sequence that is repeated in a loop of calls without names. This module uses no thread, no lock, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

HISTORY = 8192  # the calls that are remembered
MOST_ALIKE = 512  # of equal calls, so many are remembered; a period may contain so many
MOST_REPLAYED = 1024  # the calls of a schedule that are remembered when it is left
LEAST_NEEDED, MOST_NEEDED = 2, 64


class Repetitions:
    """The last calls, and how often they repeat what came before. Each call is represented by its key.

    A loop often contains shorter loops, for example over equal layers of a model. While such a loop runs, its calls are
    a repeated sequence, too. So of all sequences that repeat, the one whose repetitions reach back furthest is chosen.
    """

    def __init__(self) -> None:
        self._calls: list[Hashable] = []
        self._places: dict[Hashable, deque[int]] = {}  # for each key, its indexes in ``_calls``
        # By length: for how many of the last calls in a row, the call so many places before was equal.
        self._runs: dict[int, int] = {}
        self._needed: dict[frozenset[Hashable], int] = {}  # for sequences that have not held for long

    def clear(self) -> None:
        """Forget all calls, because other calls came in between."""
        if self._calls:
            self._calls, self._places, self._runs = [], {}, {}

    def add(self, key: Hashable) -> int:
        """Record a call. Return the length of the sequence that is repeated now; 0 if there is none.

        A sequence must be repeated at least LEAST_NEEDED times, and more often if a loop has left it soon, see
        ``doubt``.
        """
        self._record(key)
        found = [
            (run + length, -length)  # how far back; if that is equal, the shortest sequence
            for length, run in self._runs.items()
            if run >= LEAST_NEEDED * length and run >= self._needed_of(length) * length
        ]
        return -max(found)[1] if found else 0

    def doubt(self, period: Sequence[Hashable], held: bool) -> None:
        """Record that a loop did not follow the sequence ``period`` any more, although it had been repeated often enough.

        ``held``: it was worth its proof. Otherwise more repetitions of it are needed next time.
        """
        known = frozenset(period)
        self._needed[known] = LEAST_NEEDED if held else min(2 * self._needed.get(known, LEAST_NEEDED), MOST_NEEDED)

    def replayed(self, replayed: Sequence[Hashable]) -> None:
        """Record the calls that a schedule has ``replayed`` before it was left, in their order."""
        if len(replayed) > MOST_REPLAYED:
            self.clear()  # what came before is too far away to belong to the same loop
        for key in replayed[-MOST_REPLAYED:]:
            self._record(key)

    def _record(self, key: Hashable) -> None:
        if len(self._calls) >= HISTORY:
            self.clear()  # longer sequences are not searched for
        at, runs = len(self._calls), self._runs
        places = self._places.setdefault(key, deque(maxlen=MOST_ALIKE))
        self._runs = {at - before: runs.get(at - before, 0) + 1 for before in places}
        places.append(at)
        self._calls.append(key)

    def _needed_of(self, length: int) -> int:
        return self._needed.get(frozenset(self._calls[-length:]), LEAST_NEEDED) if self._needed else LEAST_NEEDED
