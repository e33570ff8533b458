"""Decide what a search measures: first the default, then the tuner's proposals, at last the best against the default.

This module uses no threads, clocks or files. It returns the settings for the next steps, and its caller passes the
measured times of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from ddlcore.contracts.tuner import Knob, Tuner, Value
from ddlcore.text.numbers import letter_size
from ddlcore.tune.gain import Gain, gain_of

Values = Mapping[str, Value]
PAIRS = 6  # pairs in a comparison
MOST_PAIRS = 12  # if 6 pairs show a gain that is not yet certain
LOOKS = 2  # at most so many further samples are taken, in total, of settings that are the best by only one sample


class Phase(Enum):
    """The purpose of a sample."""

    SEARCH = "search"  # the tuner learns from it
    COMPARE = "compare"  # the best settings are compared with the default
    WITHOUT = "without"  # the best settings are compared with the same settings without one of their changes
    FINAL = "final"  # the result is compared with the default
    DONE = "done"


@dataclass(frozen=True)
class TimedSteps:
    """The measured times of several steps with the same settings."""

    number: int
    phase: Phase
    values: Values
    steps_s: tuple[float, ...]  # duration of each measured step, on its slowest rank
    cost_s: float  # their median


@dataclass
class Comparison:
    """Two combinations of settings, ``before`` and ``after``, that are measured alternately.

    The order is before, after, after, before, … With this order, a drift of the machine's speed affects both equally.
    """

    phase: Phase
    before: dict[str, Value]
    after: dict[str, Value]
    dropped: str = ""  # the setting that ``before`` leaves at its default, in ``Phase.WITHOUT``
    before_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)

    def next(self) -> dict[str, Value] | None:
        """Return the settings that must be measured next, or None if both were measured often enough."""
        taken = len(self.before_s) + len(self.after_s)
        if taken >= 2 * self.pairs:
            return None
        return self.before if taken % 4 in (0, 3) else self.after

    def note(self, cost_s: float) -> None:
        """Record ``cost_s``, the step time in seconds with the settings that the last call of ``next`` returned."""
        taken = len(self.before_s) + len(self.after_s)
        (self.before_s if taken % 4 in (0, 3) else self.after_s).append(cost_s)

    @property
    def pairs(self) -> int:
        """The number of pairs that must be measured, according to the results so far.

        The number increases if the first pairs show a gain that is not certain.
        """
        if len(self.after_s) < PAIRS or len(self.before_s) < PAIRS:
            return PAIRS
        first = gain_of(self.before_s[:PAIRS], self.after_s[:PAIRS])
        return PAIRS if first.sure or first.mean <= 0.0 else MOST_PAIRS

    @property
    def gain(self) -> Gain:
        """The share of the step time that ``after`` saves, compared with ``before``."""
        return gain_of(self.before_s, self.after_s)


class Session:
    """One search. Call ``next`` and ``measured`` alternately.

    When ``phase`` is DONE, the search has ended, and ``result`` holds the final settings. A knob is a setting that is
    searched, with its possible values.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        default: Values,
        make_tuner: Callable[[Sequence[Knob]], Tuner],
        trials: int,
        warm: Sequence[Values] = (),
    ) -> None:
        """Begin a search with at most ``trials`` samples before the comparison with the default.

        ``default`` holds a value for each knob. ``make_tuner`` creates the tuner that proposes settings. ``warm`` holds
        combinations of settings to try first; a combination may lack some knobs.
        """
        self.knobs = tuple(knobs)
        self.default: dict[str, Value] = {knob.name: default[knob.name] for knob in knobs}
        self.trials = trials if knobs else 0
        self.samples: list[TimedSteps] = []
        self.comparisons: list[Comparison] = []
        self.result: dict[str, Value] | None = None  # final settings; the default if nothing beats it
        self.phase = Phase.SEARCH
        self._tuner = make_tuner(self.knobs) if knobs else None
        self._next: dict[str, Value] | None = dict(self.default)
        self._looks = 0
        self._warm = [self._whole(one) for one in warm]
        self._costs: dict[tuple[Value, ...], list[float]] = {}
        if not knobs:
            self._end(self.default)

    def _whole(self, values: Values) -> dict[str, Value]:
        """Return a value for each knob: the value in ``values`` if it exists and is possible, otherwise the default."""
        usable = {knob.name: values[knob.name] for knob in self.knobs if knob.name in values}
        kept = {knob.name for knob in self.knobs if knob.name in usable and knob.holds(usable[knob.name])}
        return {**self.default, **{name: usable[name] for name in kept}}

    # --- what to run

    def next(self) -> dict[str, Value]:
        """Return the settings for the next sample, or the final settings if the search has ended."""
        if self.result is not None:
            return dict(self.result)
        assert self._next is not None
        return dict(self._next)

    def measured(self, steps_s: Sequence[float]) -> TimedSteps:
        """Record and return a sample of the settings that the last call of ``next`` returned.

        ``steps_s`` holds the duration of each step in seconds, on the rank that was the slowest in this step.
        """
        assert self.result is None and self._next is not None
        values = self._next
        sample = TimedSteps(len(self.samples) + 1, self.phase, dict(values), tuple(steps_s), median(steps_s))
        self.samples.append(sample)
        if self.phase is Phase.SEARCH:
            self._costs.setdefault(self._key(values), []).append(sample.cost_s)
            assert self._tuner is not None
            self._tuner.tell(values, sample.cost_s)
            self._search()
        else:
            self.comparisons[-1].note(sample.cost_s)
            self._compare()
        return sample

    def _search(self) -> None:
        if len(self.samples) < self.trials:
            while self._warm:
                self._next = self._warm.pop(0)
                if self._key(self._next) not in self._costs:
                    return
            assert self._tuner is not None
            self._next = self._tuner.ask()
            if self._next is not None:
                return
        best = self.best
        # The minimum of many noisy times is too low. So the best settings are measured again: one lucky sample must not
        # decide.
        if len(self._costs) > 1 and len(self._costs[self._key(best)]) == 1 and self._looks < LOOKS:
            self._looks += 1
            self._next = best
        elif best == self.default:
            self._end(self.default)
        else:
            self._begin(Comparison(Phase.COMPARE, dict(self.default), best))

    def _begin(self, comparison: Comparison) -> None:
        self.comparisons.append(comparison)
        self.phase = comparison.phase
        self._next = comparison.next()

    def _compare(self) -> None:
        comparison = self.comparisons[-1]
        self._next = comparison.next()
        if self._next is not None:
            return
        sure = comparison.gain.sure
        if comparison.phase is Phase.COMPARE:
            if not sure:
                self._end(self.default)
            elif len(self.changed(comparison.after)) == 1:
                self._end(comparison.after)
            else:
                self._without_next(comparison.after, self.changed(comparison.after))
            return
        if comparison.phase is Phase.WITHOUT:
            kept = comparison.after if sure else comparison.before
            names = self.changed(self.comparisons[0].after)
            self._without_next(kept, names[names.index(comparison.dropped) + 1 :])
            return
        self._end(comparison.after if sure else self.default)

    def _without_next(self, kept: dict[str, Value], left: Sequence[str]) -> None:
        """Begin the comparison that tests the first change in ``left``: the settings ``kept`` without it and with it.

        A change is a setting that differs from the default, and ``left`` names the changes that are not tested yet. A
        change remains in the result only if it has a benefit of its own. If ``left`` is empty, or ``kept`` has at most
        one change, nothing is tested: end the search if no change was removed, else begin the final comparison with the
        default.
        """
        changed = self.changed(kept)
        if left and len(changed) > 1:
            name = left[0]
            without = {**kept, name: self.default[name]}
            self._begin(Comparison(Phase.WITHOUT, without, dict(kept), dropped=name))
        elif kept == self.comparisons[0].after:  # no change was removed: the result of the first comparison is valid
            self._end(kept)
        else:
            self._begin(Comparison(Phase.FINAL, dict(self.default), dict(kept)))

    def _end(self, values: Values) -> None:
        self.result = dict(values)
        self.phase = Phase.DONE

    # --- what is known

    def changed(self, values: Values) -> list[str]:
        """Return the names of the settings in ``values`` that differ from the default, in the order of the knobs."""
        return [knob.name for knob in self.knobs if values[knob.name] != self.default[knob.name]]

    @property
    def best(self) -> dict[str, Value]:
        """The fastest settings of the search so far, or the default before the first sample."""
        if not self._costs:
            return dict(self.default)
        key = min(self._costs, key=lambda one: median(self._costs[one]))
        return {knob.name: value for knob, value in zip(self.knobs, key)}

    def cost_s(self, values: Values) -> float | None:
        """Return the median duration in seconds of a step with the settings ``values``, or None if not tried yet."""
        costs = self._costs.get(self._key(values))
        return median(costs) if costs else None

    @property
    def final(self) -> Comparison | None:
        """The last complete comparison with the default, or None if there is none."""
        whole = [one for one in self.comparisons if one.phase is not Phase.WITHOUT and one.next() is None]
        return whole[-1] if whole else None

    def lacks(self) -> str:
        """Return a text that describes the remaining parts of the search, or "" if the search has ended."""
        if self.phase is Phase.DONE:
            return ""
        if self.phase is Phase.SEARCH:
            searched = len(self.samples)
            return f"{max(self.trials - searched, 0)} of {self.trials} trials, and the comparison with the default"
        taken = len(self.comparisons[-1].before_s) + len(self.comparisons[-1].after_s)
        what = {
            Phase.COMPARE: "the comparison of the best with the default",
            Phase.WITHOUT: f"the comparison that tells whether {self.comparisons[-1].dropped} is worth a change",
            Phase.FINAL: "the last comparison with the default",
        }[self.phase]
        return f"{what} ({taken} of {2 * self.comparisons[-1].pairs} samples)"

    def _key(self, values: Values) -> tuple[Value, ...]:
        return tuple(values[knob.name] for knob in self.knobs)


def values_text(values: Values) -> str:
    """Return ``values`` as one line of text for the user, such as "fusion_bytes=64M overlap=on"."""
    return " ".join(f"{name}={_short(name, value)}" for name, value in values.items()) or "nothing"


def _short(name: str, value: Value) -> str:
    if name.endswith("_bytes") and isinstance(value, int) and not isinstance(value, bool):
        return letter_size(value)
    return str(value)
