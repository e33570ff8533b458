"""Graphs of an elastic job give right results in a world that has other ranks than the one in which they were traced."""

from __future__ import annotations

import re

import pytest

from plugins.ddl_tf.tests.launching import PROGRAMS, launch


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(200)
def test_graphs_of_another_world() -> None:
    """A graph gives what its function gives eagerly, with other ranks, with more of them, and with fewer."""
    shown = launch(3, PROGRAMS / "other_worlds.py", timeout_s=180.0)
    assert sorted(re.findall(r"rank (\d) of (\d) agrees", shown)) == [
        *[("0", "2"), ("0", "2"), ("0", "3")],
        *[("1", "2"), ("1", "2"), ("1", "3")],
        ("2", "3"),
    ], shown
