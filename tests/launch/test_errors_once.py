"""What a user reads when ranks fail: each error once, and what the launcher says of it is true."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.starting import Begin, Ddl, ranks_of, ranks_that_wrote

pytestmark = pytest.mark.processes
Until = Callable[[Callable[[], bool]], None]

RAISES = """
import sys, time
rank, how = int(sys.argv[1]), sys.argv[2]
class PeerLost(RuntimeError): __module__ = "ddlcore.errors"
def fail():
    if how == "late" and rank == 0: time.sleep(2.0)  # longer than a traceback waits for others
    if how != "one" or rank == 1: raise KeyError("data")
    time.sleep(0.3)
    raise PeerLost("rank 1 lost: raised KeyError")
fail()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "fail.py").write_text(RAISES)
    return f"{sys.executable} fail.py $RANK"


@pytest.mark.parametrize(("label", "ranks"), [("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("10,12-13", {10, 12, 13})])
def test_the_ranks_of_a_label(label: str, ranks: set[int]) -> None:
    """These tests read them."""
    assert ranks_of(label) == ranks


def test_one_error_of_all_ranks(ddl: Ddl, tmp_path: Path, script: str) -> None:
    """One traceback on the screen, however late a rank is; the files have all, and the summary does not repeat it."""
    done = ddl("run", "-np", "3", "--output-dir", "out", "sh", "-c", f"{script} all")
    assert done.returncode == 1
    assert len(re.findall(r"^\[[0-9,-]+\] Traceback", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert ranks_that_wrote("KeyError: 'data'", done.stderr) == {0, 1, 2}
    assert re.search(r"rank \d on \S+ failed first: .*\n  its last line:\n  \| KeyError: 'data'\n", done.stderr)
    for rank in range(3):
        assert "Traceback" in (tmp_path / f"out/rank.{rank}/stderr").read_text()


@pytest.mark.long
def test_the_same_error_later(ddl: Ddl, script: str) -> None:
    """It refers to the rank whose traceback stands above."""
    done = ddl("run", "-np", "2", "sh", "-c", f"{script} late")
    assert len(re.findall(r"^\[1\] Traceback", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "[0] KeyError: 'data'  (the same traceback as rank 1's)\n" in done.stderr
    assert "[0] Traceback" not in done.stderr


@pytest.mark.parametrize("verbose", [False, True])
def test_a_lost_peer_is_one_line(ddl: Ddl, script: str, verbose: bool) -> None:
    """Unless the user wants to know where the others were."""
    done = ddl("run", "-np", "3", *["--verbose"] * verbose, "sh", "-c", f"{script} one")
    assert ranks_that_wrote("KeyError: 'data'", done.stderr) == {1}
    assert ranks_that_wrote("ddlcore.errors.PeerLost: rank 1 lost: raised KeyError", done.stderr) == {0, 2}
    assert len(re.findall(r"^\[[0-9,-]+\] Traceback", done.stderr, re.MULTILINE)) == 1 + verbose, done.stderr


def test_an_interrupt_is_reported_as_such(begin: Begin, until: Until, tmp_path: Path) -> None:
    """After Ctrl-C no rank has failed first, and none wrote nothing."""
    code = "import os, time; open('ready.' + os.environ['DDL_RANK'], 'w'); time.sleep(60)"
    run = begin("run", "-np", "2", sys.executable, "-c", code)
    until(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=80)
    assert run.returncode == 130
    assert ranks_that_wrote("KeyboardInterrupt", err) == {0, 1}
    assert "Traceback" not in err
    assert re.search(r"^ddl run: interrupted after \d+\.\d s\n\Z", err, re.MULTILINE), err
    assert "failed first" not in err and "wrote nothing" not in err


def test_a_failure_before_the_interrupt_is_still_the_cause(begin: Begin, until: Until, tmp_path: Path) -> None:
    """Ctrl-C while the others have their grace changes nothing about who failed first."""
    run = begin(
        "run", "-np", "2", "--grace-s", "60", "sh", "-c", "touch up.$RANK; [ $RANK = 1 ] && exit 4; exec sleep 60"
    )
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
    time.sleep(1.0)  # the launcher has noticed the end of rank 1 by then
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=80)
    assert run.returncode == 4
    assert re.search(r"rank 1 on \S+ failed first: it exited with code 4", err), err
