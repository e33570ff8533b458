"""The conformance suite of tuners. A plugin's test is a subclass that overrides ``make``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence

from ddlcore.contracts.tuner import Knob, Tuner, Value
from ddlcore.testing.standard import StandardSuite

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
    """The tests that every tuner must pass, however it searches.

    A subclass overrides ``make``, which creates the tuner.
    """

    def make(self, knobs: Sequence[Knob], seed: int) -> Tuner:
        """Return a new tuner that searches over ``knobs``, with the random seed ``seed``."""
        raise NotImplementedError(f"{type(self).__name__}.make() must return the tuner to test")

    def test_what_it_proposes_lies_within_the_knobs(self) -> None:
        """Proposals have one value for each knob, of Python's own types, within its range or among its choices."""
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
        """The proposals depend only on the seed and on the costs that the tuner was told."""
        runs = [list(self._search(self.make(KNOBS, 7), _bowl, 15)) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_it_learns(self) -> None:
        """After 20 trials on a smooth cost function, the least cost is within 5 % of the minimum, for each seed."""
        for seed in range(2):
            tried = list(self._search(self.make(KNOBS[:1] + KNOBS[3:], seed), _bowl))
            assert min(map(_bowl, tried)) <= 1.05 * _LEAST, f"seed {seed}: {min(map(_bowl, tried)) / _LEAST:.3f}"

    def test_it_takes_what_it_never_proposed(self) -> None:
        """A tuner accepts costs of values that it did not propose (a warm start), and then proposes valid values."""
        tuner = self.make(KNOBS[:1], 3)
        tuner.tell({"bytes": 1 << 20}, 0.010)
        tuner.tell({"bytes": 1 << 10}, 0.050)
        for values in self._search(tuner, lambda _: 0.020, 8):
            assert KNOBS[0].holds(values["bytes"])

    def test_a_flat_cost_does_no_harm(self) -> None:
        """If all costs are equal, the tuner goes on or says that it is done (None), and raises no error."""
        for values in self._search(self.make(KNOBS, 5), lambda _: 0.010):
            assert set(values) == {knob.name for knob in KNOBS}

    def test_few_values_come_to_an_end(self) -> None:
        """If a knob has only two choices, both are tried within 20 trials. After that, the tuner may return None."""
        tried = {
            values["way"] for values in self._search(self.make([Knob("way", choices=("a", "b"))], 2), lambda _: 0.010)
        }
        assert tried == {"a", "b"}

    def test_a_range_of_one_value(self) -> None:
        """A knob whose range is a single value causes no error, and always has this value."""
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
    """Return the cost of a trial in seconds. It is least for 192 KiB, way "right" and deep True."""
    nbytes = values["bytes"]
    assert not isinstance(nbytes, str)
    cost = _LEAST * (1 + 0.05 * math.log2(nbytes / (192 << 10)) ** 2)
    return cost * (1.0 if values["way"] == "right" else 1.4) * (1.0 if values["deep"] else 1.2)
