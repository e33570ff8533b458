"""The benchmark of elastic jobs: what is read from the ranks' logs, the table, and a short run from end to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_elastic import Window, fault_rows, kept, messages_each_step, row, step_s, work
from tools.elastic.job import SETTLED, Fault, Rank, fault, parse

TOOL = Path(__file__).parents[2] / "tools" / "bench_elastic.py"


def steps(begun_s: float, count: int, size: int, number: int = 0, each_s: float = 0.1) -> list[tuple[float, int, int]]:
    return [(begun_s + i * each_s, number + i, size) for i in range(count)]


def test_a_log_whose_last_line_is_not_complete() -> None:
    rank = parse("imported 5.0 1.5\nstep 6.0 1 4\nmessages 6.1 50 7\nstep 6.5 2 3\nstep 7")
    assert rank == Rank(1.5, [(6.0, 1, 4), (6.5, 2, 3)], [(50, 7)])


def test_what_a_kill_costs() -> None:
    """Process 1 is killed at 10.0; 2 and 3 go on at 10.2 and 10.3; process 4 is back at 14.0, when they stood for 0.5 s."""
    there = steps(9.0, 10, 3)
    ranks = {
        1: Rank(1.0, there),
        2: Rank(1.0, [*there, (10.05, 10, 3), (10.2, 11, 2), (13.5, 12, 2), *steps(14.0, SETTLED, 3)]),
        3: Rank(1.0, [*there, (10.3, 11, 2), (13.6, 12, 2), *steps(14.0, SETTLED, 3)]),
        4: Rank(2.5, steps(14.0, SETTLED, 3)),
    }
    cost = fault(1, 10.0, 3, ranks)
    assert cost is not None
    measured = (cost.recovered_s, cost.back_s, cost.import_s, cost.still_s)
    assert measured == pytest.approx((0.3, 4.0, 2.5, 0.5))


def test_a_world_that_is_not_whole_again() -> None:
    there = steps(9.0, 10, 3)
    ranks = {pid: Rank(1.0, [*there, (10.2, 11, 2)]) for pid in (2, 3)}
    assert fault(1, 10.0, 3, {1: Rank(1.0, there), **ranks}) is None
    assert fault(1, 10.0, 3, {1: Rank(1.0, there), **ranks, 4: Rank(2.0)}) is None


def test_medians_and_worst_cases_are_judged() -> None:
    faults = [Fault(0.2, 3.0, 2.0, 0.1), Fault(0.3, 3.0, 2.0, 0.1), Fault(1.6, 6.0, 2.0, 0.2)]
    rows = fault_rows(faults)
    assert [(one[2], one[4]) for one in rows] == [
        ("0.300 s", "holds"),
        ("1.600 s", "misses"),
        ("2.000 s", ""),
        ("1.000 s", "holds"),
        ("4.000 s", "misses"),
        ("0.100 s", "holds"),
        ("0.200 s", "holds"),
    ]


def test_a_lower_limit() -> None:
    assert row("kept", "", 97.9, 98, " %", least=True)[3:] == [">= 98 %", "misses"]
    assert row("kept", "", 98.1, 98, " %", least=True)[3:] == [">= 98 %", "holds"]


def test_work_is_counted_once_a_step() -> None:
    """Step 3 is counted although one rank alone has written it; what was before and after does not count."""
    ranks = {
        1: Rank(1.0, [(0.5, 0, 2), (1.5, 1, 2), (2.0, 2, 2), (2.5, 3, 1), (9.0, 4, 2)]),
        2: Rank(1.0, [(0.5, 0, 2), (1.6, 1, 2), (2.1, 2, 2)]),
    }
    assert work(ranks, 1.0, 3.0) == (3, 5)


def test_windows_with_a_fault_are_compared_to_those_without() -> None:
    """Of 200 steps in two windows, 195 are kept; a lost rank of two takes half of the work of 40 steps on top."""
    quiet = [*steps(0.0, 100, 2, each_s=0.01), *steps(40.0, 100, 2, number=300, each_s=0.01)]
    first = steps(10.0, 98, 2, number=100, each_s=0.01)
    second = [*steps(20.0, 57, 2, number=200, each_s=0.01), *steps(21.0, 40, 1, number=257, each_s=0.01)]
    windows = [Window(9.5, 12.0, True), Window(-0.5, 2.0, False), Window(39.5, 42.0, False), Window(19.5, 22.0, True)]
    in_steps, in_work = kept({1: Rank(1.0, quiet + first + second)}, windows)
    assert in_steps[1:] == ["2 faults, one in 2.5 s [97.0, 98.0]", "97.500 %", ">= 98 %", "misses"]
    assert in_work[2] == "87.500 %"


def test_steady_steps_and_their_messages() -> None:
    ranks = {1: Rank(1.0, [*steps(0.0, 5, 2, each_s=9.0), *steps(50.0, 5, 2, number=5)], [(50, 7), (100, 7), (150, 9)])}
    assert step_s(ranks, 2, after=4) == pytest.approx(0.1)
    assert messages_each_step(ranks) == pytest.approx(2 / 100)
    with pytest.raises(RuntimeError, match="the job was too short"):
        messages_each_step({1: Rank(1.0, [], [(50, 7)])})


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_it_measures() -> None:
    """Two ranks, one kill of each kind: every row is there. A short run says nothing about times, so none is compared."""
    pytest.importorskip("torch", reason="torch is not installed")
    options = ["--np", "2", "--kills", "1", "--rounds", "1", "--round-s", "2", "--seconds", "4", "--faults", "1"]
    command = [sys.executable, str(TOOL), *options, "--compute-ms", "2", "--no-check"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=360)  # it takes half a minute, and twice that on a slow machine
    finally:
        if process.poll() is None:  # the jobs that it has started must end, too
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, out + err
    for what in ("kill -9 to", "process start", "stand still", "elastic on over off", "in steps of ranks"):
        assert what in out, out
    (messages,) = [line for line in out.splitlines() if line.startswith("control messages")]
    assert messages.split()[-5:] == ["1", "0.000", "<=", "0", "holds"], out
