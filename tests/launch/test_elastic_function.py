"""``ddlcore.run`` of an elastic job: the results are those of the last world."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState
from ddlcore.api.elastic import run as elastic_run
from ddlcore.errors import RankFailed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory among processes is for Linux"),
]


def trains(folder: str, until: int = 0) -> tuple[int, int, float]:
    """Train 40 steps; the first process of rank 1 is killed. ``until``: train until there were so many ranks."""
    ddl.init()
    place = int(os.environ["DDL_RANK"])
    killed = Path(folder) / "killed"
    grown = time.monotonic() + 60.0

    @elastic_run
    def train(state: Any) -> tuple[int, int, float]:
        while state.steps < 40:
            while until and state.steps == 30 and ddl.size() < until and time.monotonic() < grown:
                (Path(folder) / "waits").touch()
                time.sleep(0.02)
                state.check_host_updates()
            if place == 1 and state.steps == 20 and not killed.exists() and not until:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += float(ddl.allreduce(np.ones(3), name="x")[0])
            state.commit()
        return ddl.rank(), ddl.size(), state.total

    return train(ObjectState(total=0.0))


def test_a_rank_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The results are in the order of the ranks of the last world, and each has applied each step once."""
    results = ddl.run(trains, (str(tmp_path),), num_proc=3, min_num_proc=1)
    assert len(results) in (2, 3) and results == [(rank, len(results), 40.0) for rank in range(len(results))]
    assert "rank 1 killed by signal 9 (SIGKILL); it is started again" in capfd.readouterr().err


@pytest.mark.long
def test_ranks_are_added_by_a_script(tmp_path: Path) -> None:
    script = f"test -e {tmp_path}/waits && echo localhost:3 || echo localhost:1"
    call = {"min_num_proc": 1, "max_num_proc": 3, "host_discovery_script": script}
    results = ddl.run(trains, (str(tmp_path), 3), **call)
    assert results == [(rank, 3, 40.0) for rank in range(3)]


def fails() -> None:
    ddl.init()

    @elastic_run
    def train(state: Any) -> None:
        raise ValueError("no good")

    train(ObjectState())


def test_an_error_of_the_function_ends_the_job() -> None:
    with pytest.raises(RankFailed, match="ValueError: no good"):
        ddl.run(fails, num_proc=2, min_num_proc=1)


def test_a_function_that_is_not_elastic() -> None:
    """It returns as always."""
    assert ddl.run(int, ("7",), num_proc=2, min_num_proc=1) == [7, 7]
