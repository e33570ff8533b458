"""tools/bench_startup.py compares as it says. No job is started: times are those of the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import bench_startup
from tools.training.report import Spread

DDL_S, TORCHRUN_S = [1.0, 4.0, 2.0], [1.0, 2.0, 2.0]  # by round


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which command was timed, in order. The first time of each is that of a cold start."""
    order: list[str] = []
    times = {"ddl": iter([90.0, *DDL_S]), "torchrun": iter([10.0, *TORCHRUN_S])}

    def seconds(command: list[str]) -> float:
        order.append(Path(command[0]).name)
        return next(times[order[-1]])

    monkeypatch.setattr(bench_startup, "seconds", seconds)
    return order


def main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_startup.py", *words])
    return bench_startup.main()


def test_ratios_are_those_of_a_round(
    timed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runs once before the first round, and then in alternation. The table has medians of times and of ratios."""
    assert main(monkeypatch, "--rounds", "3") == 0
    assert timed == ["ddl", "torchrun", "torchrun", "ddl", "ddl", "torchrun", "torchrun", "ddl"]
    head, line = (text.split("  ") for text in capsys.readouterr().out.splitlines())
    titles, cells = ([cell.strip() for cell in row if cell.strip()] for row in (head, line))
    assert dict(zip(titles, cells)) == {
        "start to end": "one allreduce",
        "ranks": "2",
        "ddl s": "2.00",
        "torchrun s": "2.00",
        "ddl / torchrun": "1.000",
        "95 % interval": "[1.000, 2.000]",
        "target": "<= 1.10",
        "verdict": "holds",
    }


@pytest.mark.parametrize(
    ("words", "code", "verdict"), [([], 1, "misses"), (["--no-check"], 0, "misses"), (["--np", "3"], 0, "")]
)
def test_a_target_that_is_missed_is_the_exit_status(
    words: list[str],
    code: int,
    verdict: str,
    timed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless it is not to be checked. The target is for two ranks only."""
    monkeypatch.setattr(bench_startup, "spread", lambda ratios: Spread(1.2, 1.3, 1.4))
    assert main(monkeypatch, "--rounds", "2", *words) == code
    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith(verdict or "[1.200, 1.400]"), line


def test_both_commands_start_as_many_ranks() -> None:
    """Their scripts are there."""
    commands = bench_startup.commands(3)
    assert list(commands) == ["ddl", "torchrun"]
    ddl, torchrun = commands.values()
    assert ddl[1:4] == ["run", "-np", "3"] and torchrun[1] == "--nproc-per-node=3"
    assert Path(ddl[-1]).is_file() and Path(torchrun[-1]).is_file()


@pytest.mark.processes
def test_a_command_that_fails_is_not_timed(capfd: pytest.CaptureFixture[str]) -> None:
    """Its output is shown."""
    with pytest.raises(subprocess.CalledProcessError):
        bench_startup.seconds(["sh", "-c", "echo why; exit 3"])
    assert capfd.readouterr().err.strip() == "why"
    assert bench_startup.seconds(["true"]) > 0.0
