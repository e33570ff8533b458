"""The built-in fusion policy passes the fusion suite."""

from __future__ import annotations

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.contracts.fusion import FusionPolicy
from ddlcore.testing import FusionSuite


class TestThresholdFusion(FusionSuite):
    def make(self) -> FusionPolicy:
        return ThresholdFusion()
