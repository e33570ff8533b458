"""ddl's standard tests of fusion policies, and a test of this policy's own order."""

from __future__ import annotations

from ddl_bysize.fusion import BySizeFusion

from ddlcore.contracts.fusion import FusionPolicy, Ready
from ddlcore.testing import FusionSuite


class TestBySize(FusionSuite):
    def make(self) -> FusionPolicy:
        return BySizeFusion()


def test_small_ones_come_first() -> None:
    """Within one interval small tensors come first; a later interval comes later, however small its tensors are."""
    ready = [Ready("a", "f4", 90), Ready("b", "f4", 10), Ready("c", "f4", 20), Ready("d", "f4", 1, time_s=0.5)]
    assert BySizeFusion().arrange(ready, {"fusion_bytes": 40.0}) == [[1, 2], [0], [3]]
