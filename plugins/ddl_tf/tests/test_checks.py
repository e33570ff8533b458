"""`ddl doctor` names TensorFlow distributions that overwrite each other's files, and says what to type."""

from __future__ import annotations

import pytest
from ddl_tf.checks import KnownBadTensorFlow

from ddlcore.contracts.check import Finding, HostView, Seen


def judged(installed: dict[str, str]) -> list[Finding]:
    check = KnownBadTensorFlow()
    return list(check.judge([Seen("node1", 0, 0, check.look(HostView("node1", distributions=installed)))]))


def test_what_is_bad() -> None:
    """Two distributions: both are named with their versions."""
    (found,) = judged({"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0"})
    assert found.what == "tensorflow 2.21.0 beside tensorflow-cpu 2.20.0 on node1"
    assert "pip " in found.fix


@pytest.mark.parametrize("installed", [{}, {"tensorflow-cpu": "2.21.0"}, {"tensorflow": "2.21.0", "numpy": "2.1.0"}])
def test_what_is_fine(installed: dict[str, str]) -> None:
    """One distribution, or packages that fit together, are not reported."""
    assert judged(installed) == []
