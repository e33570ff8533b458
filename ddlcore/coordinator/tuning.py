"""Connects a search for better settings to replay, and runs the trials of the search.

A period is one pass through the schedule. In a trial, several periods run with the same settings. A trial ends at the
end of a period. All ranks then stop by themselves, and report how long each period took. When all ranks have reported,
the next trial begins at the same bucket on all ranks. This module is part of the coordinator's state machine, without a
thread and without a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ddlcore.coordinator.replay_controller import KnownSchedule
from ddlcore.messages.coding import decode_spec
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.to_coordinator import Paused
from ddlcore.messages.to_rank import Adjust
from ddlcore.types import Kind, Value

MOST_DISCARDED = 8  # after so many discarded trials in succession, the search ends


class Trial(Protocol):
    """A combination of settings that must be measured, and the number of periods for which it is measured."""

    @property
    def values(self) -> Mapping[str, Value]:
        """Return the settings of the trial, by name."""

    @property
    def periods(self) -> int:
        """Return the number of periods (passes through the schedule) of the trial; 0 if the trial never ends."""


class SearchDriver(Protocol):
    """The search for better settings, with the methods that the coordinator calls.

    Every call returns immediately. Only one thread at a time makes calls.
    """

    @property
    def given(self) -> Mapping[str, Value]:
        """Return the settings that all ranks have at the start, by name."""

    @property
    def reopens(self) -> Collection[str]:
        """Return the names of those settings that take effect only when a communicator opens.

        All other settings of the search decide how a schedule is arranged in buckets.
        """

    def trial(self, nbytes: int) -> Trial:
        """Return the next trial. ``nbytes`` is the number of bytes that one period of the schedule reduces."""

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """Record the result of the last trial.

        ``periods_ns`` contains, for each rank, the durations of the periods in nanoseconds, without the first period.
        """

    def trial_discarded(self) -> None:
        """Record that the ranks left replay in the middle of the last trial, so that its measurement is not usable."""

    def gave_up(self, why: str) -> None:
        """Record that the search has ended for the reason ``why``.

        From now on, ``trial`` returns a trial that never ends.
        """


class Tuning:
    """The search for better settings in one world.

    Only the schedule that moves the most bytes is tuned: its periods are measured with different settings. Other
    schedules are replayed without changes.
    """

    def __init__(self, driver: SearchDriver | None, layout: Mapping[str, Value]) -> None:
        """Create the object.

        ``driver`` is the search, or None if nothing is tuned. ``layout`` contains the settings by which schedules are
        arranged in buckets, before the search changes any of them.
        """
        self.layout: dict[str, Value] = dict(layout)  # the present settings by which schedules are arranged
        self._driver = driver
        self._told: dict[str, Value] = {**(driver.given if driver is not None else {}), **layout}  # the ranks' values
        self._tuned: KnownSchedule | None = None
        self._tuned_bytes = 0
        self._paused: dict[WorldRank, Paused] | None = None  # by rank; None: no trial is running
        self._awaited: frozenset[WorldRank] = frozenset()
        self._measured = False  # whether the running trial comes from the search driver
        self._discarded = 0

    def tunes(self, known: KnownSchedule) -> bool:
        """End the present trial, and return whether ``known`` is the schedule that is tuned.

        ``known`` is the schedule that will be replayed next.
        """
        self._paused, self._measured = None, False
        return self._driver is not None and self._is_tuned(known)

    def begin(self, aligned: bool, awaited: frozenset[WorldRank]) -> tuple[int, list[Adjust]]:
        """Begin a trial. Return its number of periods, and the messages that all ranks must get before the trial.

        0 periods mean that the trial never ends. ``aligned`` says that replay continues at the beginning of a period,
        so that the schedule can be arranged anew. If ``aligned`` is False, the present period is first run to its end,
        with the present settings. ``awaited`` are the ranks that will report the end of the trial.
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

    def paused(self, rank: WorldRank, message: Paused) -> bool:
        """Record that ``rank`` has reached the end of the trial. ``message`` contains the rank's measurements.

        Return True if all ranks have reached the end, so that the next trial must begin; otherwise False.
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

    def awaited(self) -> tuple[WorldRank, ...]:
        """Return the ranks that have not reached the end of the trial, if others already wait there; otherwise ()."""
        return tuple(sorted(self._awaited - self._paused.keys())) if self._paused else ()

    def left(self) -> None:
        """Record that the ranks leave replay. If a trial is running, it is discarded."""
        self._paused = None
        if not self._measured or self._driver is None:
            return
        self._measured = False
        self._discarded += 1
        self._driver.trial_discarded()
        if self._discarded >= MOST_DISCARDED:
            self._driver.gave_up("the training loop leaves its period too often to be measured")

    def stop(self) -> None:
        """End the search, because a rank leaves. From now on nothing is measured and no setting changes."""
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
