"""`ddl doctor` finds an MXNet that cannot be imported with the installed numpy, and says what to type."""

from __future__ import annotations

import pytest
from ddl_mxnet.checks import KnownBadMxnet

from ddlcore.contracts.check import Finding, HostView, Seen


def judged(installed: dict[str, str]) -> list[Finding]:
    check = KnownBadMxnet()
    return list(check.judge([Seen("node1", 0, 0, check.look(HostView("node1", distributions=installed)))]))


def test_what_is_bad() -> None:
    """The finding names both versions."""
    (found,) = judged({"mxnet": "1.8.0", "numpy": "1.26.4"})
    assert found.what == "mxnet 1.8.0 beside numpy 1.26.4 on node1"
    assert "pip " in found.fix


@pytest.mark.parametrize(
    "installed",
    [
        {},
        {"mxnet": "1.8.0"},
        {"mxnet": "1.8.0", "numpy": "1.23.5"},
        {"mxnet": "1.9.1", "numpy": "1.26.4"},
    ],
)
def test_what_is_fine(installed: dict[str, str]) -> None:
    """There is no finding if MXNet or numpy is missing, or if their versions fit."""
    assert judged(installed) == []
