"""Draws settings at random: at first from the whole range, then closer and closer to the best settings so far."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from ddlcore.contracts.tuner import Knob, Tuner, Value

__all__ = ["RandomSearchTuner"]

ANYWHERE = 8  # draws before it searches only around the best
NARROWING = 0.85  # factor of the searched range, for each draw after those


class RandomSearchTuner(Tuner):
    """Pure random search (Anderson, 1953) with a shrinking neighbourhood; it never says that it is done."""

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        super().__init__(knobs, seed)
        self._random = random.Random(seed)
        self._drawn = 0
        self._best: tuple[float, dict[str, Value]] | None = None

    def ask(self) -> dict[str, Value] | None:
        self._drawn += 1
        width = NARROWING ** max(0, self._drawn - ANYWHERE)
        return {knob.name: self._draw(knob, width) for knob in self.knobs}

    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        if math.isfinite(cost) and (self._best is None or cost < self._best[0]):
            self._best = (cost, dict(values))

    def _draw(self, knob: Knob, width: float) -> Value:
        best = self._best[1].get(knob.name) if self._best is not None and self._drawn > ANYWHERE else None
        if knob.choices:
            stays = best in knob.choices and self._random.random() > width
            return best if stays and best is not None else self._random.choice(knob.choices)
        low, high = (math.log(knob.low), math.log(knob.high)) if knob.logarithmic else (knob.low, knob.high)
        if best is not None and not isinstance(best, str):
            middle = math.log(best) if knob.logarithmic else float(best)
            half = width * (high - low) / 2
            low, high = max(low, middle - half), min(high, middle + half)
        drawn = self._random.uniform(low, high)
        value = min(max(math.exp(drawn) if knob.logarithmic else drawn, knob.low), knob.high)
        return round(value) if knob.whole else value
