"""A tuner that searches by a Gaussian process and expected improvement, with the package scikit-optimize.

``tell`` fits the Gaussian process again, and takes 40 to 65 ms. So ``tell`` must never run while a training step waits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ddlcore.contracts.tuner import Knob, Tuner, Value

FIRST = 6  # number of points, evenly spread or passed to ``tell``, before the Gaussian process makes proposals
CANDIDATES = 2000  # points at which the expected improvement is evaluated
OFTEN = 3  # the search ends when it would propose a point that was already passed to ``tell`` so many times


class BayesTuner(Tuner):
    """A tuner that searches by a Gaussian process.

    This tuner needs the package scikit-optimize, which the extra ``ddlcore[tune]`` installs.
    """

    def __init__(self, knobs: Sequence[Knob], seed: int = 0) -> None:
        super().__init__(knobs, seed)
        from skopt import Optimizer
        from skopt.space import Categorical, Real
        from skopt.utils import cook_estimator
        from skopt.utils import normalize_dimensions as normalize

        # Ranges are searched from 0 to 1; the knob itself converts that to logarithmic or whole values.
        space = [Categorical(list(range(len(k.choices)))) if k.choices else Real(0.0, 1.0) for k in self.knobs]
        self._optimizer: Any = Optimizer(
            space,
            base_estimator=cook_estimator("GP", normalize(space), random_state=seed, n_restarts_optimizer=0),
            n_initial_points=FIRST,
            initial_point_generator="halton",
            acq_func="EI",
            acq_optimizer="sampling",  # with few knobs, a descent from the best samples is slower, and no better
            acq_optimizer_kwargs={"n_points": CANDIDATES},
            random_state=seed,
        )
        self._told: dict[tuple[Value, ...], int] = {}

    def ask(self) -> dict[str, Value] | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about points that were proposed before, and about convergence
            point = self._optimizer.ask()
        # The values have numpy's types: the index of a choice, or the position in a range from 0 to 1.
        values = {
            knob.name: knob.choices[int(x)] if knob.choices else knob.at(float(x)) for knob, x in zip(self.knobs, point)
        }
        return None if self._told.get(self._key(values), 0) >= OFTEN else values

    def tell(self, values: Mapping[str, Value], cost: float) -> None:
        from threadpoolctl import threadpool_limits  # comes with scikit-learn

        key = self._key(values)
        self._told[key] = self._told.get(key, 0) + 1
        point = [k.choices.index(values[k.name]) if k.choices else k.part(values[k.name]) for k in self.knobs]
        # Small matrices gain nothing from many threads, and the ranks need the cores.
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore")
            self._optimizer.tell(point, math.log(cost))  # so that a gain is a ratio, whatever the step's length

    def _key(self, values: Mapping[str, Value]) -> tuple[Value, ...]:
        return tuple(values[knob.name] for knob in self.knobs)
