"""Ranks that do not answer at all (stopped, or holding the interpreter lock): reported, ended, named, wherever others wait."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ddlcore.launch.ranks.warmup import compile_kernels
from tests.faults.silence import DEADLINE_S, Case, Result, pause_all, play
from tests.kernels.compiled import ALL_CODE
from tests.launch.starting import ranks_that_wrote

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are stopped and looked at as Linux does it"),
]
ACROSS = importlib.util.find_spec("ddl_gloo") is not None and importlib.util.find_spec("torch") is not None
AT_ONCE = 12  # jobs, which mostly wait
MATRIX = [
    Case(how, phase, overlap, hosts)
    for hosts, how, phase, overlap in itertools.product(
        (1, 2), ("stop", "lock"), ("negotiation", "replay"), (True, False)
    )
]
OTHERS = [
    Case("stop", "replay", silent=(0,)),
    Case("lock", "negotiation", silent=(0,)),
    Case("stop", "replay", size=4, silent=(1, 2, 3)),
    Case("lock", "replay", overlap=False, size=3, silent=(2,)),
    Case("stop", "init"),
    Case("stop", "shutdown"),
    Case("lock", "shutdown"),
]
AWAKE = [
    Case("stop", "replay", wakes_s=8, warning_s=2.0, shutdown_s=60.0),
    Case("lock", "negotiation", wakes_s=8, warning_s=2.0, shutdown_s=60.0),
    Case("stop", "replay", wakes_s=5, warning_s=0.0, shutdown_s=0.0),
]
PAUSED = Case("stop", "pause", silent=(), warning_s=3.0, shutdown_s=6.0)
PAUSE_S = 7.0
STALLED = "DeadlineExceeded: stalled for more than"


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_compiled() -> None:
    compile_kernels(ALL_CODE, print, "")


def check(case: Case, result: Result) -> None:
    """It was reported before it was ended; the launcher killed the silent ranks, and names the first of them."""
    assert result.report_s is not None, result.told
    assert result.returncode == 137, result.told
    ranks = "|".join(map(str, case.silent))
    silent = rf"ranks? [0-9,-]*(?:{ranks})[0-9,-]* do(?:es)? not answer at all: no message from"
    assert re.search(rf"{silent}.* and (?:it was|they were) last asked", result.told), result.told
    assert re.search(rf"rank (?:{ranks}) on \S+ failed first: it was killed by signal 9", result.told), result.told
    if case.phase in ("negotiation", "replay"):
        assert re.search(r"allreduce\.[abcd] +\S+ +\S+ +[0-9.]+", result.told), result.told
        raised = ranks_that_wrote(STALLED, result.told)
        assert raised == set(range(case.size)) - set(case.silent), result.told


def check_awake(case: Case, result: Result) -> None:
    """Every sum was right. It was reported, and reported as back; or nothing was said, where nothing is to be."""
    assert result.returncode == 0 and result.out.count("done") == case.size, result.told
    if case.wakes_s and case.warning_s:
        assert "rank 1 does not answer at all" in result.told
        assert re.search(r"rank 1 answers again, after [0-9.]+ s of silence", result.told), result.told
    else:
        assert "stalled" not in result.told


def play_all(cases: Sequence[Case], folder: Path) -> list[Result]:
    def one(number: int, case: Case) -> Result:
        pause = pause_all(PAUSE_S, case.size) if case.phase == "pause" else None
        return play(case, folder / str(number), pause)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(len(cases)), cases))


@pytest.mark.slow("the limits that it waits for are seconds")
def test_a_stopped_rank_is_reported_and_ended(tmp_path: Path) -> None:
    """In replay, on one host: what `make test` has of the cases below."""
    case = Case("stop", "replay", warning_s=2.0, shutdown_s=4.0)
    check(case, play(case, tmp_path / "job"))


@pytest.mark.long
@pytest.mark.timeout(6 * DEADLINE_S)
def test_a_silent_rank_is_reported_and_ended_and_one_that_wakes_up_goes_on(tmp_path: Path) -> None:
    """Stopped or in C; in negotiation, replay, init and shutdown; rank 0, all but one, one of a ring, one of another host.

    One that wakes up in time goes on, with right sums; so does a job that was stopped as a whole, launcher and agents
    included, for longer than a stall may last: their own pause is nobody's silence.
    """
    across = [MATRIX[10], MATRIX[15], replace(PAUSED, hosts=2)] if ACROSS else []
    ending = [*across[:2], *MATRIX[:8], *OTHERS]
    cases = [*AWAKE, PAUSED, *across[2:], *(replace(case, warning_s=3.0, shutdown_s=6.0) for case in ending)]
    for case, result in zip(cases, play_all(cases, tmp_path)):
        if case in AWAKE or case.phase == "pause":
            check_awake(case, result)
        else:
            assert result.end_s > 5.0, f"{case}: {result.told}"
            check(case, result)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", [*(MATRIX if ACROSS else MATRIX[:8]), *OTHERS], ids=Case.name)
def test_every_run_of_a_case_is_in_time(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 2 s of the warning time and 5 s of the shutdown time, in each of SOAK_RUNS (20) runs; prints the times."""
    runs = int(os.environ.get("SOAK_RUNS", "20"))
    with ThreadPoolExecutor(int(os.environ.get("SOAK_AT_ONCE", "2"))) as pool:
        results = list(pool.map(lambda number: play(case, tmp_path / str(number)), range(runs)))
    for result in results:
        check(case, result)
    reports = [result.report_s for result in results if result.report_s is not None]
    raised = [result.raised_s for result in results if result.raised_s is not None]
    ends = [result.end_s for result in results]
    times = {"report": reports, "raised": raised, "end": ends}  # nobody raises in shutdown
    told = [f"{what} {statistics.median(of):.2f} s, max {max(of):.2f} s" for what, of in times.items() if of]
    with capsys.disabled():
        print(f"\n{case.name()}: {len(results)} runs; medians: {'; '.join(told)}")
    assert max(reports) <= case.warning_s + 2.0
    assert max(ends) <= case.shutdown_s + 5.0
