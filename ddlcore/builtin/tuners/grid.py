"""A tuner that varies one knob after the other, first on a coarse grid, then on finer grids around the best point.

A knob is a setting whose value a tuner may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddlcore.contracts.tuner import Knob, Tuner, Value

COARSE = 4  # parts of a range in the first round
FINEST = 64  # parts of a range in the last rounds

Point = tuple[Value, ...]


class GridTuner(Tuner):
    """A tuner that searches on grids, and needs no further packages.

    In each round, the tuner varies one knob after the other, while the other knobs keep their best values. After the
    first round, the step of the grid is halved. After a later round, it is halved only if the round found no better
    point; otherwise the tuner searches the same grid again around the better point.
    """

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        super().__init__(knobs, seed)
        self._costs: dict[Point, list[float]] = {}
        self._rounds = self._walk()

    def ask(self) -> dict[str, Value] | None:
        point = next(self._rounds, None)
        return None if point is None else {knob.name: value for knob, value in zip(self.knobs, point)}

    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        self._costs.setdefault(tuple(values[knob.name] for knob in self.knobs), []).append(cost)

    def _best(self) -> Point:
        if not self._costs:
            return tuple(knob.at(0.5) for knob in self.knobs)
        return min(self._costs, key=lambda point: sum(self._costs[point]) / len(self._costs[point]))

    def _walk(self) -> Iterator[Point]:
        if not self._costs:
            yield self._best()
        parts = COARSE
        while parts <= FINEST:
            moved = False
            for i, knob in enumerate(self.knobs):
                before = self._best()
                for value in self._candidates(knob, before[i], parts):
                    point = (*before[:i], value, *before[i + 1 :])
                    if point not in self._costs:
                        yield point
                moved = moved or self._best() != before
            # If a round on a finer grid has found a better point, the same grid is searched again around that point.
            if not moved or parts == COARSE:
                parts *= 2

    def _candidates(self, knob: Knob, best: Value, parts: int) -> list[Value]:
        if knob.choices:
            return [choice for choice in knob.choices if choice != best]
        if parts == COARSE:
            return [knob.at(i / parts) for i in range(parts + 1)]
        here = knob.part(best)
        return [knob.at(part) for part in (here - 1 / parts, here + 1 / parts) if -0.5 / parts < part < 1 + 0.5 / parts]
