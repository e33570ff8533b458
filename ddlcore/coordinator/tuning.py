"""Connects a search for better settings to replay: runs trials, each of several whole periods with the same settings.

Part of the coordinator's state machine, without a thread or a clock. Ranks stop by themselves at the end of a trial,
which is the end of a period, and report how long its periods took. When all have done so, the next trial begins at the
same bucket on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ddlcore.coordinator.replay_controller import KnownSchedule
from ddlcore.messages import Adjust, Paused, decode_spec
from ddlcore.types import Kind, Value

MOST_DISCARDED = 8  # so many discarded trials in succession show that this loop cannot be measured


class Trial(Protocol):
    """The trial that is run next."""

    @property
    def values(self) -> Mapping[str, Value]:
        """Return the settings of the trial, by name."""

    @property
    def periods(self) -> int:
        """Return the number of periods; 0 for no end."""


class SearchDriver(Protocol):
    """The search as the coordinator sees it. Every call returns immediately; only one thread calls at a time."""

    @property
    def given(self) -> Mapping[str, Value]:
        """Return the settings that ranks have without being told, by name."""

    @property
    def reopens(self) -> Collection[str]:
        """Return the settings that take effect only when a communicator opens.

        All others determine how a schedule is laid out.
        """

    def trial(self, nbytes: int) -> Trial:
        """Return the next trial of a schedule whose period moves ``nbytes`` bytes."""

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """Take the result of the last trial: by rank, how long its periods took, without the first one."""

    def trial_discarded(self) -> None:
        """Note that the last trial was left in the middle, so it says nothing."""

    def gave_up(self, why: str) -> None:
        """Note that the search is over: from now on a trial never ends."""


class Tuning:
    """The tuning of one world. It tunes the schedule that moves the most bytes; others are replayed as they are."""

    def __init__(self, driver: SearchDriver | None, layout: Mapping[str, Value]) -> None:
        """Create the tuning. ``layout``: the settings before anything is tuned."""
        self.layout: dict[str, Value] = dict(layout)  # the present settings for laying out schedules
        self._driver = driver
        self._told: dict[str, Value] = {**(driver.given if driver is not None else {}), **layout}  # as ranks know them
        self._tuned: KnownSchedule | None = None
        self._tuned_bytes = 0
        self._paused: dict[int, Paused] | None = None  # by rank; None: no trial is running
        self._awaited: frozenset[int] = frozenset()
        self._measured = False  # whether the running trial comes from the search driver
        self._discarded = 0

    def tunes(self, known: KnownSchedule) -> bool:
        """Return whether ``known``, which will be replayed next, is the schedule that is tuned."""
        self._paused, self._measured = None, False
        return self._driver is not None and self._is_tuned(known)

    def begin(self, aligned: bool, awaited: frozenset[int]) -> tuple[int, list[Adjust]]:
        """Begin a trial. Return its number of periods (0: it never ends), and what all ranks must be told before it.

        ``aligned``: the trial begins at the beginning of a period, so the schedule can be laid out anew by ``layout``;
        otherwise the present period is first run to its end. ``awaited``: the ranks that will send Paused.
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
        """Note that ``rank`` has come to the trial's end.

        Return whether all have, so that the next trial must begin.
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
        """Return the ranks that have not come to the end of the running trial, if other ranks wait there."""
        return tuple(sorted(self._awaited - self._paused.keys())) if self._paused else ()

    def left(self) -> None:
        """Note that replay is left in the middle of the running trial, if there is one."""
        self._paused = None
        if not self._measured or self._driver is None:
            return
        self._measured = False
        self._discarded += 1
        self._driver.trial_discarded()
        if self._discarded >= MOST_DISCARDED:
            self._driver.gave_up("the training loop leaves its period too often to be measured")

    def stop(self) -> None:
        """End the tuning, because a rank leaves: from now on nothing is measured, and no setting changes."""
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
