"""Several processes train as one process does, and send nothing to the coordinator in replay."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from plugins.ddl_mxnet.tests.launching import PROGRAMS, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.long
def test_processes_agree_and_steady_steps_are_quiet() -> None:
    """1 and 2 ranks agree after ten steps of a network with deferred shapes, and then send no control message."""
    found = {
        size: [json.loads(line) for line in re.findall(r"found (\{.*\})", launch(size, PROGRAMS / "quiet.py"))]
        for size in (1, 2)
    }
    one, (first, second) = found[1][0], found[2]
    assert first["last"] == second["last"]
    for expected, values, others in zip(one["values"], first["values"], second["values"], strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-5)
        assert values == others
    for rank in (first, second):
        assert rank["buckets_replayed"] >= 30
        assert [rank["control_messages"], rank["buckets_negotiated"]] == [0, 0]


@pytest.mark.slow("ranks import MXNet, and one is killed")
def test_a_trainer_outlives_its_world_and_hears_of_a_death() -> None:
    """After shutdown and init a trainer continues in the new world; if a rank is killed, ``step`` raises PeerLost."""
    shown = launch(2, PROGRAMS / "lives.py", check=False)
    sums = re.findall(r"^\[\d\] sum (\S+)", shown, re.MULTILINE)
    assert len(re.findall(r"^\[\d\] alone True", shown, re.MULTILINE)) == 2, shown
    assert len(sums) == 2, shown
    assert len(set(sums)) == 1, shown
    assert re.search(r"lost \(1,\) 1?\d\.\d\b", shown), shown
