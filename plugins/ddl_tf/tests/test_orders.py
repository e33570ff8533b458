"""On real processes: no pool of TensorFlow's threads, not even of one, makes ranks wait for each other forever."""

from __future__ import annotations

import re

import pytest

from plugins.ddl_tf.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360), pytest.mark.slow]


def test_independent_collectives_in_different_orders() -> None:
    """200 runs of a session and 200 of functions, 16 collectives each, shuffled on each rank by itself."""
    shown = launch(2, PROGRAMS / "orders.py", "session,function")
    lines = re.findall(r"(\w+: correct in 200 runs of 16), ([\d.]+) s", shown)
    print(lines)
    assert sorted(line for line, _ in lines) == sorted(
        ["session: correct in 200 runs of 16", "function: correct in 200 runs of 16"] * 2
    )
