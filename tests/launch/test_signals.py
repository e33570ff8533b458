"""Signals reach the ranks, Ctrl-C ends them in two steps, and nothing survives a launcher that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.starting import Begin

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
Until = Callable[[Callable[[], bool]], None]


def ready(directory: Path, count: int) -> Callable[[], bool]:
    return lambda: len(list(directory.glob("ready.*"))) == count


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_signals_are_forwarded_to_the_ranks_alone(name: str, begin: Begin, until: Until, tmp_path: Path) -> None:
    """Each rank gets it, once; what a rank has started does not (a DataLoader worker would die of a SIGUSR1)."""
    child = f'(trap "echo child" {name}; touch ready.$RANK.c; read x < fifo) &'
    script = f'{child} trap "echo got; kill -9 $!; exit 5" {name}; touch ready.$RANK; wait'
    os.mkfifo(tmp_path / "fifo")
    run = begin("run", "-np", "2", "sh", "-c", script)
    until(ready(tmp_path, 4))
    run.send_signal(getattr(signal, f"SIG{name}"))
    out, err = run.communicate(timeout=80)
    assert sorted(out.splitlines()) == ["[0] got", "[1] got"], err
    assert run.returncode == 5


def test_the_first_ctrl_c_ends_gently(begin: Begin, until: Until, tmp_path: Path) -> None:
    """Ranks get SIGINT with all that they started, and may finish; a second one is offered."""
    script = 'trap "echo saved; exit 0" INT; touch ready.$RANK; while true; do sleep 0.05; done'
    run = begin("run", "-np", "2", "sh", "-c", script)
    until(ready(tmp_path, 2))
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=80)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert run.returncode == 0
    assert "press Ctrl-C again to kill" in err


def test_a_rank_that_dies_of_ctrl_c_gives_130(begin: Begin, until: Until, tmp_path: Path) -> None:
    """As a shell would."""
    run = begin("run", "-np", "2", "sh", "-c", "touch ready.$RANK; sleep 30")
    until(ready(tmp_path, 2))
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=80)
    assert run.returncode == 130


def test_the_second_ctrl_c_kills(begin: Begin, until: Until, tmp_path: Path) -> None:
    """At once, also ranks that ignore everything."""
    script = 'trap "" INT TERM; touch ready.$RANK; while true; do sleep 0.05; done'
    run = begin("run", "-np", "2", "--grace-s", "120", "sh", "-c", script)
    until(ready(tmp_path, 2))
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.poll() is None
    begun_s = time.monotonic()
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=80)
    assert time.monotonic() - begun_s < 20.0
    assert run.returncode == 130


def test_kill_9_of_the_launcher_leaves_nothing(begin: Begin, until: Until, tmp_path: Path) -> None:
    """The ranks end with it, whatever they do; the leak check of the test session looks too."""
    script = 'trap "" INT TERM HUP; echo $$ > pid.$RANK; touch ready.$RANK; while true; do :; done'
    run = begin("run", "-np", "3", "sh", "-c", script)
    until(ready(tmp_path, 3))
    pids = [int(path.read_text()) for path in tmp_path.glob("pid.*")]
    run.kill()
    run.wait(timeout=40)
    until(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
