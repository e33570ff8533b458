"""Where a search for better settings meets replay: in trials, each so many whole periods with the same settings.

Part of the coordinator's state machine: no thread, no clock. Ranks stop by themselves at a trial's end, which
is a period's, and say how long its periods took; when all have, the next trial begins at the same bucket on all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ddlcore.messages import Adjust, Paused, decode_spec
from ddlcore.runtime.replay_controller import KnownSchedule
from ddlcore.types import Kind, Value

__all__ = ["SearchDriver", "Trial", "Tuning", "Value"]

MOST_DISCARDED = 8  # trials in a row that were left in the middle: this loop does not hold still for being measured


class Trial(Protocol):
    """What is run next."""

    @property
    def values(self) -> Mapping[str, Value]:
        """The settings that hold, by name."""

    @property
    def periods(self) -> int:
        """For so many periods; 0: for ever."""


class SearchDriver(Protocol):
    """The search, as the coordinator sees it. Every call returns at once; one thread at a time."""

    @property
    def given(self) -> Mapping[str, Value]:
        """What ranks have without being told, by name."""

    @property
    def reopens(self) -> Collection[str]:
        """The settings that only take effect when a communicator opens; what a schedule is laid out by are the others."""

    def trial(self, nbytes: int) -> Trial:
        """The next trial of a schedule whose period moves ``nbytes`` bytes."""

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """The last trial is over: how long its periods took, the first of them left out, by rank."""

    def trial_discarded(self) -> None:
        """The last trial was left in the middle: it says nothing."""

    def gave_up(self, why: str) -> None:
        """The search is over: from now on a trial never ends."""


class Tuning:
    """Of one world. The schedule that moves the most bytes is tuned; others are replayed as they are."""

    def __init__(self, driver: SearchDriver | None, layout: Mapping[str, Value]) -> None:
        """``layout``: what holds before anything is tuned."""
        self.layout: dict[str, Value] = dict(layout)  # what schedules are laid out by, now
        self._driver = driver
        self._told: dict[str, Value] = {**(driver.given if driver is not None else {}), **layout}  # what all ranks have
        self._tuned: KnownSchedule | None = None
        self._tuned_bytes = 0
        self._paused: dict[int, Paused] | None = None  # by rank; None: no trial is under way
        self._awaited: frozenset[int] = frozenset()
        self._measured = False  # whether the trial under way is one of the search driver's
        self._discarded = 0

    def tunes(self, known: KnownSchedule) -> bool:
        """Whether ``known``, which is about to be replayed, is what is tuned."""
        self._paused, self._measured = None, False
        return self._driver is not None and self._is_tuned(known)

    def begin(self, aligned: bool, awaited: frozenset[int]) -> tuple[int, list[Adjust]]:
        """A trial of what is tuned: of how many periods (0: it never ends), and what all ranks must be told before.

        ``aligned``: it begins at a period's begin, and is to be laid out anew by ``layout``; else a trial to the end
        of the present period comes first. ``awaited``: who will say Paused.
        """
        assert self._driver is not None
        self._paused, self._awaited = {}, awaited
        if not aligned:
            return 1, []
        trial = self._driver.trial(self._tuned_bytes)
        self._measured = trial.periods > 0
        if not trial.periods:
            self._paused = None
        reopens = self._driver.reopens
        self.layout.update({name: value for name, value in trial.values.items() if name not in reopens})
        told = {name: value for name, value in trial.values.items() if name in reopens or name == "overlap"}
        changed = {name: value for name, value in told.items() if self._told.get(name) != value}
        self._told.update(changed)
        return trial.periods, [Adjust(tuple(sorted(changed.items())))] if changed else []

    def paused(self, rank: int, message: Paused) -> bool:
        """``rank`` has come to the trial's end. True when all have: the next is to begin."""
        if self._paused is None:
            return False
        self._paused[rank] = message
        if not self._awaited <= self._paused.keys():
            return False
        if self._measured and self._driver is not None:
            self._discarded = 0
            self._driver.trial_over([self._paused[one].periods_ns for one in sorted(self._awaited)])
        self._paused = None
        self._measured = False
        return True

    def awaited(self) -> tuple[int, ...]:
        """The ranks that have not come to the end of the trial under way, where others wait there."""
        return tuple(sorted(self._awaited - self._paused.keys())) if self._paused else ()

    def left(self) -> None:
        """Replay is left in the middle of whatever trial is under way."""
        self._paused = None
        if not self._measured or self._driver is None:
            return
        self._measured = False
        self._discarded += 1
        self._driver.trial_discarded()
        if self._discarded >= MOST_DISCARDED:
            self._driver.gave_up("the training loop leaves its period too often to be measured")

    def stop(self) -> None:
        """A rank is going: there is nothing more to be learned in this world, and nothing changes any more."""
        self.left()
        self._driver = None

    def _is_tuned(self, known: KnownSchedule) -> bool:
        if known is not self._tuned:
            nbytes = sum(
                spec.nbytes()
                for planned in known.arranged.buckets
                for spec in map(decode_spec, planned.specs)
                if spec.kind is Kind.ALLREDUCE
            )
            if self._tuned is None or nbytes >= self._tuned_bytes:
                self._tuned, self._tuned_bytes = known, nbytes
        return known is self._tuned and self._tuned_bytes > 0
