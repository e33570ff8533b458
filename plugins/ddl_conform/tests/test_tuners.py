"""The built-in tuners pass the tuner suite."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddlcore.builtin.tuners.grid import GridTuner
from ddlcore.contracts.tuner import Knob, Tuner
from ddlcore.testing import TunerSuite

pytest.importorskip("skopt", reason="pip install 'ddlcore[tune]': the tuner bayes needs scikit-optimize")


class TestGrid(TunerSuite):
    def make(self, knobs: Sequence[Knob], seed: int) -> Tuner:
        return GridTuner(knobs, seed)


class TestBayes(TunerSuite):
    def make(self, knobs: Sequence[Knob], seed: int) -> Tuner:
        from ddlcore.builtin.tuners.bayes import BayesTuner

        return BayesTuner(knobs, seed)
