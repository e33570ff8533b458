"""Gloo with `ddl run`: the example learns, repeated steps send no control message, a dead rank is reported at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 30


def launch(size: int, program: Path, *args: str) -> tuple[int, str]:
    """Return the exit code, and what the ranks printed, with its prefixes."""
    # Only the example trains one model on all ranks, which can be verified.
    checks = ["--verify-every", "10"] if EXAMPLES in program.parents else []
    words = ["run", "-np", str(size), "--backend", "gloo", *checks, sys.executable, str(program), *args]
    done = subprocess.run(
        [sys.executable, "-m", "ddlcore.launch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    return done.returncode, done.stdout


def told(word: str, shown: str) -> list[dict[str, Any]]:
    """Return what ranks printed after ``word``."""
    return [json.loads(line) for line in re.findall(rf"^\[\d+\] {word} (\{{.*\}})$", shown, re.MULTILINE)]


@pytest.mark.long
def test_digits() -> None:
    """Two ranks learn, and end with equal parameters to the last bit."""
    pytest.importorskip("ddl_torch", reason="the example is ddl_torch's")
    code, shown = launch(2, EXAMPLES / "torch_digits.py")
    assert code == 0, shown
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", shown)
    assert float(accuracy) >= 95.0, shown
    assert len(set(re.findall(r"parameters (\w{12})", shown))) == 1, shown


@pytest.mark.slow("three ranks train, and one is killed")
def test_steady_steps_send_nothing_and_a_death_is_told(tmp_path: Path) -> None:
    """Repeated steps send no control message in replay.

    When rank 1 is killed, the others soon learn which rank is lost, and release everything.
    """
    code, shown = launch(3, PROGRAMS / "steps.py", str(tmp_path / "died"))
    found = told("found", shown)
    assert len(found) == 3, shown
    assert all(rank["control_messages"] == 0 for rank in found), found
    assert all(rank["buckets_replayed"] >= STEPS and rank["buckets_negotiated"] == 0 for rank in found)
    assert all(rank["route"] == "gloo (asked for)" for rank in found)
    lost = told("lost", shown)
    assert [rank["ranks"] for rank in lost] == [[1], [1]], shown
    assert all(rank["late_s"] < 20.0 for rank in lost), lost
    assert told("left", shown) == [{"threads": [], "sockets": 0}] * 2
    assert code == 128 + 9


@pytest.mark.long
def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong interface gives one line that lists the existing ones, and no rank hangs."""
    monkeypatch.setenv("DDL_NETWORK_INTERFACE", "nothing0")
    code, shown = launch(2, PROGRAMS / "steps.py")
    assert code != 0
    assert re.search(r"TransportError: gloo: no network interface is called nothing0 on .*; there are lo", shown), shown
