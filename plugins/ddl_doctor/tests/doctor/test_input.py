"""A program that waits for its input: which share of a step, at which line, and what is said of one that shows no steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_doctor.doctor import watching
from ddl_doctor.doctor.report import DoctorReport
from ddl_doctor.doctor.subject import Question, subject_of
from ddl_doctor.doctor.watching import InputWatch, judge_input, watch_input
from ddl_doctor.reports import Profile, to_send

from ddlcore.launch.job.watch import RunningRanks
from ddlcore.launch.output.screen import Screen
from ddlcore.launch.ranks.exit_status import NotStarted
from tests.launch.starting import DDL

SCRIPT = """
import time
import numpy as np, ddlcore as ddl

def batches():
    while True:
        time.sleep(0.05)
        yield np.ones(1000)

ddl.init()
for x in batches():
    time.sleep(0.02)
    ddl.allreduce(x, name="gradient")
"""


@pytest.mark.long
@pytest.mark.processes
def test_an_input_that_waits_50_ms(tmp_path: Path) -> None:
    """Named with its line, its share and a fix; exit code 1; the program was ended and is gone."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*DDL, "doctor", "--no-links", "--json", "--steps", "12", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)["findings"]
    assert found["check"] == "input"
    assert "train.py:11 `for x in batches():`" in found["what"]
    assert "num_workers" in found["fix"]
    share = int(found["what"].partition("%")[0].split()[-1])
    assert 55 < share < 85  # 50 of 70 ms, and what the machine adds


@pytest.mark.processes
def test_a_program_that_fails(tmp_path: Path) -> None:
    """Its exit code and its last line."""
    (tmp_path / "train.py").write_text("raise SystemExit('no such data set')\n")
    done = subprocess.run(
        [*DDL, "doctor", "-np", "1", "--json", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)["findings"]
    assert "ended with exit code 1 before 30 of its steps were seen" in found["what"]
    assert "no such data set" in found["means"]
    assert found["fix"].startswith("run it alone first: ddl run -np 1")


def test_a_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before is kept: the report goes on."""

    def refuse(launch: object) -> int:
        raise NotStarted("node2: train.py is not there")

    monkeypatch.setattr(watching, "run_job", refuse)
    report = DoctorReport("a title")
    subject = subject_of(1, None, None, {}, {"PATH": os.environ["PATH"]})
    watch_input(subject, Question(program=("python", "train.py"), command=("python", "train.py")), report)
    (found,) = report.findings
    assert found.what == "`python train.py` could not be started: node2: train.py is not there"


def profile(input_s: float, steps: int = 10) -> Profile:
    lines = (("train.py:9", "loss.backward()", 1.0 - input_s, 0.0), ("train.py:7", "for x in data:", input_s, input_s))
    return Profile(steps, 1.0, input_s, "main in train.py", lines)


def test_the_rank_that_waits_longest() -> None:
    """One finding, whatever the number of ranks: the others wait for that one."""
    (found,) = judge_input({0: profile(0.02), 1: profile(0.3)}, lambda rank: f"node{rank}")
    assert found.what == "rank 1 waits for input for 30% of a step: 30.0 of 100.0 ms at train.py:7 `for x in data:`"
    assert found.where == "node1" and "70.0 ms" in found.means
    assert judge_input({0: profile(0.02), 1: profile(0.09)}, str) == []


def test_when_it_is_enough() -> None:
    """All ranks have seen enough steps; stopped once."""
    watch, stops = InputWatch(2, 10, 60.0), list[int]()
    out = Screen(lambda data: None)
    quiet, _ = watch.screens((out, out))
    quiet.show("rank", [(b"loss 0.3", b"\n")])
    watch.begin(RunningRanks(lambda: stops.append(1), str, lambda: ""))
    watch.heard(0, to_send(profile(0.1)))
    watch.heard(1, to_send(profile(0.1, steps=9)))
    assert stops == []
    watch.heard(1, to_send(profile(0.1)))
    watch.heard(1, to_send(profile(0.1, steps=11)))
    watch.drained()
    assert stops == [1] and list(watch.written) == ["loss 0.3"]
