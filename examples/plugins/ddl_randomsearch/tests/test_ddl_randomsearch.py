"""ddl's standard tests of tuners, for this tuner."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_randomsearch.tuner import RandomSearchTuner

from ddlcore.contracts.tuner import Knob, Tuner
from ddlcore.testing import TunerSuite


class TestRandomSearch(TunerSuite):
    def make(self, knobs: Sequence[Knob], seed: int) -> Tuner:
        return RandomSearchTuner(knobs, seed)
