"""On real processes: ranks never wait for each other forever, even if TensorFlow has only one thread."""

from __future__ import annotations

import re

import pytest

from plugins.ddl_tf.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360), pytest.mark.long]


def test_independent_collectives_in_different_orders() -> None:
    """200 runs of a session and 200 of functions succeed, with 16 collectives each in another order on each rank."""
    shown = launch(2, PROGRAMS / "orders.py", "session,function")
    lines = re.findall(r"(\w+: correct in 200 runs of 16), ([\d.]+) s", shown)
    print(lines)
    assert sorted(line for line, _ in lines) == sorted(
        ["session: correct in 200 runs of 16", "function: correct in 200 runs of 16"] * 2
    )
