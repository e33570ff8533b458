"""The conformance suite of tuners. To test a tuner, write a subclass that overrides ``make``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence

from ddl_conform.standard import StandardSuite
from ddlcore.contracts.tuner import Knob, Tuner, Value

__all__ = ["TunerSuite"]

KNOBS = (
    Knob("bytes", 1 << 10, 1 << 24, logarithmic=True),
    Knob("part", 0.0, 1.0, whole=False),
    Knob("count", 1, 9),
    Knob("way", choices=("left", "right", "round")),
    Knob("deep", choices=(False, True)),
)
TRIALS = 20


class TunerSuite(StandardSuite):
    """The tests that every tuner must pass, with any method of search.

    A subclass overrides ``make``, which creates the tuner. A knob is a setting whose value a tuner may change.
    """

    def make(self, knobs: Sequence[Knob], seed: int) -> Tuner:
        """Return a new tuner that searches for values of ``knobs``, with the random seed ``seed``."""
        raise NotImplementedError(f"{type(self).__name__}.make() must return the tuner to test")

    def test_what_it_proposes_lies_within_the_knobs(self) -> None:
        """``ask`` returns one value for each knob, which is in the knob's range or among the knob's choices.

        The value is a str, int, float or bool of Python, not a number of numpy.
        """
        tuner = self.make(KNOBS, 1)
        rng = random.Random(1)
        for values in self._search(tuner, lambda _: rng.uniform(0.01, 0.02)):
            assert list(values) == [knob.name for knob in KNOBS]
            for knob in KNOBS:
                value = values[knob.name]
                assert knob.holds(value), f"{knob.name}={value!r} is none of its values"
                assert type(value) in (str, int, float, bool), f"{knob.name}={value!r} is a {type(value).__name__}"
            assert json.loads(json.dumps(values)) == values

    def test_the_same_seed_proposes_the_same(self) -> None:
        """If two tuners with the same seed get the same costs by ``tell``, ``ask`` returns the same values for both."""
        runs = [list(self._search(self.make(KNOBS, 7), _bowl, 15)) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_it_learns(self) -> None:
        """After 20 trials with a smooth cost function, the least cost so far is at most 5 % above the minimum.

        The test does this with two seeds.
        """
        for seed in range(2):
            tried = list(self._search(self.make(KNOBS[:1] + KNOBS[3:], seed), _bowl))
            assert min(map(_bowl, tried)) <= 1.05 * _LEAST, f"seed {seed}: {min(map(_bowl, tried)) / _LEAST:.3f}"

    def test_it_takes_what_it_never_proposed(self) -> None:
        """``tell`` accepts the costs of values that the tuner has not proposed, for example from an earlier search.

        After that, ``ask`` still returns valid values.
        """
        tuner = self.make(KNOBS[:1], 3)
        tuner.tell({"bytes": 1 << 20}, 0.010)
        tuner.tell({"bytes": 1 << 10}, 0.050)
        for values in self._search(tuner, lambda _: 0.020, 8):
            assert KNOBS[0].holds(values["bytes"])

    def test_a_flat_cost_does_no_harm(self) -> None:
        """If all costs are equal, the tuner raises no error.

        ``ask`` returns further values, or None to end the search.
        """
        for values in self._search(self.make(KNOBS, 5), lambda _: 0.010):
            assert set(values) == {knob.name for knob in KNOBS}

    def test_few_values_come_to_an_end(self) -> None:
        """If there is only one knob with two choices, the tuner proposes both choices within 20 trials.

        After that, ``ask`` may return None to end the search.
        """
        tried = {
            values["way"] for values in self._search(self.make([Knob("way", choices=("a", "b"))], 2), lambda _: 0.010)
        }
        assert tried == {"a", "b"}

    def test_a_range_of_one_value(self) -> None:
        """If the range of a knob is a single value, the tuner raises no error and always proposes this value."""
        for values in self._search(self.make([Knob("count", 4, 4), Knob("part", 0, 1, whole=False)], 2), lambda _: 1.0):
            assert values["count"] == 4

    def _search(
        self, tuner: Tuner, cost: Callable[[Mapping[str, Value]], float], trials: int = TRIALS
    ) -> list[dict[str, Value]]:
        tried: list[dict[str, Value]] = []
        for _ in range(trials):
            values = tuner.ask()
            if values is None:
                break
            tried.append(values)
            tuner.tell(values, cost(values))
        assert tried, "it proposed nothing at all"
        return tried


_LEAST = 0.010


def _bowl(values: Mapping[str, Value]) -> float:
    """Return the cost of a trial with ``values`` in seconds, for a test.

    The least cost, 10 ms, is at bytes = 192 KiB, way = "right" and deep = True.
    """
    nbytes = values["bytes"]
    assert not isinstance(nbytes, str)
    cost = _LEAST * (1 + 0.05 * math.log2(nbytes / (192 << 10)) ** 2)
    return cost * (1.0 if values["way"] == "right" else 1.4) * (1.0 if values["deep"] else 1.2)
