"""A rank that is killed in the middle of a step does not change what a training with MXNet learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plugins.ddl_mxnet.tests.launching import EXAMPLES, PROGRAMS

pytestmark = [pytest.mark.processes, pytest.mark.long]
STEPS = 60


def run(ranks: int, flags: list[str], killed: Path) -> tuple[str, list[tuple[Any, list[str]]]]:
    """Return the output, and for each rank its values and the other words of its result."""
    program = [sys.executable, "-u", str(PROGRAMS / "elastic_steps.py"), str(killed), str(STEPS), str(ranks)]
    command = [sys.executable, "-m", "ddlcore", "run", "-np", str(ranks), *flags, *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    results = [line.split() for line in re.findall(r"result (.*)", done.stdout)]
    return done.stdout, [(np.frombuffer(bytes.fromhex(words[0])), words[1:]) for words in results]


def test_a_killed_rank_changes_nothing(tmp_path: Path) -> None:
    """Parameters, running statistics, update counts and the scheduler's rate equal those of an undisturbed process."""
    untouched = tmp_path / "untouched"
    untouched.touch()  # nobody is killed
    _, [(expected, words)] = run(1, [], untouched)
    killed = tmp_path / "killed"
    output, results = run(3, ["--min-np", "2"], killed)
    assert killed.exists()
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", output)]
    assert STEPS // 2 in begun  # the survivors go on where they were
    assert STEPS // 2 < max(begun) < STEPS  # the killed rank has joined them
    assert len(results) == 3
    for values, theirs in results:
        assert np.abs(values - expected).max() < 1e-10
        assert theirs == words


def test_the_example_learns() -> None:
    """It reaches 90 % on images that it has not seen, and all ranks end with the same parameters."""
    program = [sys.executable, "-u", str(EXAMPLES / "mxnet_elastic_digits.py")]
    command = [sys.executable, "-m", "ddlcore", "run", "-np", "2", "--min-np", "1", *program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    [accuracy] = re.findall(r"test accuracy ([\d.]+) %", done.stdout)
    assert float(accuracy) > 90
    digests = re.findall(r"parameters (\w+)", done.stdout)
    assert len(digests) == 2
    assert len(set(digests)) == 1
