"""Where a search for better settings meets replay: in legs, each so many whole periods with the same settings.

Part of the coordinator's state machine: no thread, no clock. Ranks stop by themselves at a leg's end, which
is a period's, and say how long its periods took; when all have, the next leg begins at the same bucket on all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ddlcore.messages import Adjust, Paused, decode_spec
from ddlcore.runtime.rhythm import Known
from ddlcore.types import Kind, Value

__all__ = ["Leg", "Pilot", "Tuning", "Value"]

MOST_SPOILED = 8  # legs in a row that were left in the middle: this loop does not hold still for being measured


class Leg(Protocol):
    """What is run next."""

    @property
    def values(self) -> Mapping[str, Value]:
        """The settings that hold, by name."""

    @property
    def periods(self) -> int:
        """For so many periods; 0: for ever."""


class Pilot(Protocol):
    """The search, as the coordinator sees it. Every call returns at once; one thread at a time."""

    @property
    def given(self) -> Mapping[str, Value]:
        """What ranks have without being told, by name."""

    @property
    def reopens(self) -> Collection[str]:
        """The settings that only take effect when a communicator opens; what a schedule is laid out by are the others."""

    def leg(self, nbytes: int) -> Leg:
        """The next leg of a schedule whose period moves ``nbytes`` bytes."""

    def flown(self, periods_ns: Sequence[Sequence[int]]) -> None:
        """The last leg is over: how long its periods took, the first of them left out, by rank."""

    def spoiled(self) -> None:
        """The last leg was left in the middle: it says nothing."""

    def gave_up(self, why: str) -> None:
        """The search is over: from now on a leg never ends."""


class Tuning:
    """Of one world. The schedule that moves the most bytes is tuned; others are replayed as they are."""

    def __init__(self, pilot: Pilot | None, layout: Mapping[str, Value]) -> None:
        """``layout``: what holds before anything is tuned."""
        self.layout: dict[str, Value] = dict(layout)  # what schedules are laid out by, now
        self._pilot = pilot
        self._told: dict[str, Value] = {**(pilot.given if pilot is not None else {}), **layout}  # what all ranks have
        self._tuned: Known | None = None
        self._tuned_bytes = 0
        self._paused: dict[int, Paused] | None = None  # by rank; None: no leg is under way
        self._awaited: frozenset[int] = frozenset()
        self._measured = False  # whether the leg under way is one of the pilot's
        self._spoiled = 0

    def tunes(self, known: Known) -> bool:
        """Whether ``known``, which is about to be replayed, is what is tuned."""
        self._paused, self._measured = None, False
        return self._pilot is not None and self._is_tuned(known)

    def begin(self, aligned: bool, awaited: frozenset[int]) -> tuple[int, list[Adjust]]:
        """A leg of what is tuned: of how many periods (0: it never ends), and what all ranks must be told before.

        ``aligned``: it begins at a period's begin, and is to be laid out anew by ``layout``; else a leg to the end
        of the present period comes first. ``awaited``: who will say Paused.
        """
        assert self._pilot is not None
        self._paused, self._awaited = {}, awaited
        if not aligned:
            return 1, []
        leg = self._pilot.leg(self._tuned_bytes)
        self._measured = leg.periods > 0
        if not leg.periods:
            self._paused = None
        reopens = self._pilot.reopens
        self.layout.update({name: value for name, value in leg.values.items() if name not in reopens})
        told = {name: value for name, value in leg.values.items() if name in reopens or name == "overlap"}
        changed = {name: value for name, value in told.items() if self._told.get(name) != value}
        self._told.update(changed)
        return leg.periods, [Adjust(tuple(sorted(changed.items())))] if changed else []

    def paused(self, rank: int, message: Paused) -> bool:
        """``rank`` has come to the leg's end. True when all have: the next is to begin."""
        if self._paused is None:
            return False
        self._paused[rank] = message
        if not self._awaited <= self._paused.keys():
            return False
        if self._measured and self._pilot is not None:
            self._spoiled = 0
            self._pilot.flown([self._paused[one].periods_ns for one in sorted(self._awaited)])
        self._paused = None
        self._measured = False
        return True

    def awaited(self) -> tuple[int, ...]:
        """The ranks that have not come to the end of the leg under way, where others wait there."""
        return tuple(sorted(self._awaited - self._paused.keys())) if self._paused else ()

    def left(self) -> None:
        """Replay is left in the middle of whatever leg is under way."""
        self._paused = None
        if not self._measured or self._pilot is None:
            return
        self._measured = False
        self._spoiled += 1
        self._pilot.spoiled()
        if self._spoiled >= MOST_SPOILED:
            self._pilot.gave_up("the training loop leaves its period too often to be measured")

    def stop(self) -> None:
        """A rank is going: there is nothing more to be learned in this world, and nothing changes any more."""
        self.left()
        self._pilot = None

    def _is_tuned(self, known: Known) -> bool:
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
