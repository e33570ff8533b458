"""Connects a search for better settings to replay: runs trials, each of several whole periods with the same settings.

It has no thread and no clock, and is part of the coordinator's state machine. Ranks stop by themselves at the end of a
trial, which is the end of a period, and report how long its periods took. When all have done so, the next trial begins
at the same bucket on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ddlcore.coordinator.replay_controller import KnownSchedule
from ddlcore.messages import Adjust, Paused, decode_spec
from ddlcore.types import Kind, Value

MOST_DISCARDED = 8  # after so many discarded trials in succession, the search ends


class Trial(Protocol):
    """A combination of settings that must be measured, and for how long."""

    @property
    def values(self) -> Mapping[str, Value]:
        """Return the settings of the trial, by name."""

    @property
    def periods(self) -> int:
        """Return how many periods the trial lasts; 0 if it never ends."""


class SearchDriver(Protocol):
    """The search, as the coordinator uses it. Every call returns immediately. One thread at a time makes calls."""

    @property
    def given(self) -> Mapping[str, Value]:
        """Return the settings that all ranks have at the start, by name."""

    @property
    def reopens(self) -> Collection[str]:
        """Return the names of those settings that take effect only when a communicator opens.

        All other settings decide how a schedule is arranged in buckets.
        """

    def trial(self, nbytes: int) -> Trial:
        """Return the next trial. In each period of the schedule, ``nbytes`` bytes are reduced."""

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """Take the result of the last trial: for each rank, the duration of each period but the first, in nanoseconds."""

    def trial_discarded(self) -> None:
        """Record that the last trial was left in the middle, so that its measurement says nothing."""

    def gave_up(self, why: str) -> None:
        """Record that the search has ended for the reason ``why``.

        From now on, ``trial`` returns a trial that never ends.
        """


class Tuning:
    """The search for settings in one world.

    It tunes the schedule that moves the most bytes; other schedules are replayed without changes.
    """

    def __init__(self, driver: SearchDriver | None, layout: Mapping[str, Value]) -> None:
        """Create the tuning. ``driver``: the search, or None.

        ``layout``: the settings before the search changes any.
        """
        self.layout: dict[str, Value] = dict(layout)  # the present settings by which schedules are arranged
        self._driver = driver
        self._told: dict[str, Value] = {**(driver.given if driver is not None else {}), **layout}  # the ranks' values
        self._tuned: KnownSchedule | None = None
        self._tuned_bytes = 0
        self._paused: dict[int, Paused] | None = None  # by rank; None: no trial is running
        self._awaited: frozenset[int] = frozenset()
        self._measured = False  # whether the running trial comes from the search driver
        self._discarded = 0

    def tunes(self, known: KnownSchedule) -> bool:
        """Return whether ``known``, which will be replayed next, is the schedule that is tuned.

        The trial before it has ended.
        """
        self._paused, self._measured = None, False
        return self._driver is not None and self._is_tuned(known)

    def begin(self, aligned: bool, awaited: frozenset[int]) -> tuple[int, list[Adjust]]:
        """Begin a trial, and return its number of periods and the messages that all ranks must get before it.

        0 periods mean that the trial never ends. ``aligned`` says that replay continues at the beginning of a period,
        so that the schedule can be arranged anew. Otherwise, the present period is first run to its end. ``awaited``
        are the ranks that will report the end of the trial.
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
        """Record that ``rank`` has come to the end of the trial.

        Returns True if all ranks have, so that the next trial must begin.
        """
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
        """Return the ranks that have not come to the end of the trial while other ranks wait there."""
        return tuple(sorted(self._awaited - self._paused.keys())) if self._paused else ()

    def left(self) -> None:
        """Record that the ranks leave replay in the middle of a trial, if a trial is running."""
        self._paused = None
        if not self._measured or self._driver is None:
            return
        self._measured = False
        self._discarded += 1
        self._driver.trial_discarded()
        if self._discarded >= MOST_DISCARDED:
            self._driver.gave_up("the training loop leaves its period too often to be measured")

    def stop(self) -> None:
        """End the search, because a rank leaves: from now on nothing is measured, and no setting changes."""
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
