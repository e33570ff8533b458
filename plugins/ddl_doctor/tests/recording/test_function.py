"""Test the timelines of ``ddlcore.run``, and the messages that ddl gives if the package that records timelines is missing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from ddl_doctor.timeline.reading import read_trace

import ddlcore
from ddlcore.commands.cli import main
from ddlcore.errors import PluginError, RankFailed
from ddlcore.process.job import Job
from ddlcore.testing import World


@pytest.mark.processes
def test_a_function_leaves_a_trace_also_of_a_rank_that_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calling process merges what the ranks have written, as ``ddl run`` does."""

    def train() -> None:
        ddlcore.init()
        for step in range(60):
            ddlcore.allreduce(np.full(64, step, np.float32), name="grads", op=ddlcore.Sum)
            time.sleep(0.01)
        if ddlcore.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ddlcore.shutdown()

    with pytest.raises(RankFailed, match="rank 1 killed by signal 9"):
        ddlcore.run(train, env={"DDL_TIMELINE": str(tmp_path / "t.json")}, num_proc=2)
    assert f"ddlcore.run: timeline in {tmp_path / 't.json'};" in capsys.readouterr().err
    metadata, _ = read_trace(tmp_path / "t.json")
    assert [(one["rank"], one["complete"]) for one in metadata["ranks"]] == [(0, True), (1, False)]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_without_the_package_the_flag_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rank is started."""
    monkeypatch.setenv("DDL_PLUGINS_OFF", "ddl-doctor")
    assert main(["run", "-np", "2", "--timeline", "t.json", "true"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("ddl run: --timeline: ddl-doctor 0.1.0 is off: DDL_PLUGINS_OFF"), err


def test_without_the_package_a_script_learns_why() -> None:
    """The call raises an error with the reason, and the job goes on."""

    def program(rank: int, job: Job) -> None:
        with pytest.raises(PluginError, match=r"no recorder is called 'timeline'; ddl-doctor 0\.1\.0 is off: DDL_PL"):
            ddlcore.start_timeline("t.json")
        ddlcore.stop_timeline()
        assert ddlcore.allreduce(np.ones(2), name="x", op=ddlcore.Sum).tolist() == [2.0, 2.0]

    with World(2, settings={"plugins_off": "ddl-doctor"}) as world:
        world.run(program)
