"""`ddl doctor` finds an original Horovod, and says what to type."""

from __future__ import annotations

import pytest
from ddl_horovod.checks import KnownBadHorovod

from ddlcore.contracts.check import HostView, Seen


@pytest.mark.parametrize(("installed", "found"), [({"horovod": "0.28.1"}, 1), ({"ddl-horovod": "0.1.0"}, 0), ({}, 0)])
def test_the_original_is_found(installed: dict[str, str], found: int) -> None:
    """`ddl doctor` finds the original Horovod by the name of its distribution."""
    check = KnownBadHorovod()
    findings = list(check.judge([Seen("node1", 0, 0, check.look(HostView("node1", distributions=installed)))]))
    assert [finding.what for finding in findings] == ["horovod 0.28.1 on node1"] * found
    assert all("pip uninstall" in finding.fix for finding in findings)
