"""kill -9 at random moments: who waits is told soon who died, and nothing is left behind."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from tests.faults.exact_calls import EXACT_CALLS
from tests.faults.harness import LEAK_MARK, Launch, leftovers

pytestmark = pytest.mark.timeout(600)

SIZE = 3
KILLS = 8  # of each victim in each phase; make soak tries a hundred
PHASES = ("init", "collective", "compute", "shutdown")
LIMIT_S = 2.0  # for half of them; the slowest has ten times as long, for a machine that does much else

Say = Callable[..., None]


SETTLED = 20  # steps, after which the ranks replay


def _reduce(step: int) -> Any:
    return ddl.allreduce(np.ones(5000, np.float32), name="g")


def _until_lost(say: Say, phase: str = "") -> None:
    """Collectives until one raises; says when and what."""
    call: Callable[[int], Any] = EXACT_CALLS.get(phase, _reduce)
    try:
        for step in itertools.count():
            if step == SETTLED and phase in EXACT_CALLS:
                say("inside")
            call(step)
    except ddl.PeerLost as error:
        say("lost", ",".join(map(str, error.ranks)))


def play(victim: int, phase: str, rank: int, say: Say) -> None:
    """What each rank does while ``victim`` is about to die in ``phase``."""
    say("enters")
    try:
        ddl.init()
    except ddl.PeerLost as error:
        say("lost", ",".join(map(str, error.ranks)))
        return
    if phase not in EXACT_CALLS:
        say("inside")
    if rank == victim:
        if phase == "compute":
            while True:
                sum(range(1000))
        if phase == "shutdown":
            ddl.allreduce(np.ones(5000, np.float32), name="g")
            say("leaves")
            ddl.shutdown()
            time.sleep(10)
    _until_lost(say, phase)
    ddl.shutdown()


def _one_kill(victim: int, phase: str, rng: random.Random) -> float:
    """Seconds from the kill until the last survivor has raised PeerLost naming the victim."""
    launch = Launch(SIZE, partial(play, victim, phase))
    try:
        word = {"init": "enters", "shutdown": "leaves"}.get(phase, "inside")
        launch.await_word(victim, word)
        time.sleep(rng.uniform(0, 0.02))
        killed_s = launch.kill(victim)
        slowest_s = 0.0
        for rank in range(SIZE):
            if rank != victim:
                moment_s, whom = launch.await_word(rank, "lost")
                assert whom.split(",")[0] == str(victim)
                slowest_s = max(slowest_s, moment_s - killed_s)
        return slowest_s
    finally:
        hung = launch.close()
        assert hung == [], [report.said for report in launch.reports]


@pytest.mark.long
def test_every_survivor_learns_who_died(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of victim × phase: half of the PeerLosts come within 2 s, the slowest soon, and 0 things are left."""
    _kill_all(KILLS, range(SIZE), PHASES, capsys)


@pytest.mark.long
def test_every_survivor_learns_who_died_in_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """The same inside each kind of collective, in replay."""
    _kill_all(3, (1,), tuple(EXACT_CALLS), capsys)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_survivor_of_a_thousand_learns_who_died(capsys: pytest.CaptureFixture[str]) -> None:
    """The same, a hundred kills each."""
    _kill_all(100, range(SIZE), PHASES, capsys)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_survivor_of_many_learns_who_died_in_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    _kill_all(30, range(SIZE), tuple(EXACT_CALLS), capsys)


def _kill_all(kills: int, victims: Sequence[int], phases: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(int(os.environ.get("DDL_TEST_SEED", "7")))
    before = leftovers()
    rows = []
    for victim in victims:
        for phase in phases:
            times_s = [_one_kill(victim, phase, rng) for _ in range(kills)]
            rows.append((victim, phase, sorted(times_s)[kills // 2], max(times_s), leftovers(before)))
    with capsys.disabled():
        print(f"\n{'victim':>6}  {'phase':<13} {'kills':>5}  {'median s':>8}  {'slowest s':>9}  {'left':>4}")
        for victim, phase, median_s, slowest_s, left in rows:
            print(f"{victim:>6}  {phase:<13} {kills:>5}  {median_s:>8.3f}  {slowest_s:>9.3f}  {len(left):>4}")
    assert max(row[2] for row in rows) <= LIMIT_S
    assert max(row[3] for row in rows) <= 10 * LIMIT_S
    assert [one for row in rows for one in row[4]] == []


STRANGER = """
import mmap, os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0ddl-" + sys.argv[1])
with open("/dev/shm/" + sys.argv[1], "wb+") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
print("there", flush=True)
sys.stdin.read()
os.unlink("/dev/shm/" + sys.argv[1])
"""


@pytest.mark.parametrize("ours", [True, False])
def test_leftovers_are_those_of_this_session(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what another session's process holds at the same time."""
    monkeypatch.setattr("tests.faults.harness.STAYS_S", 0.5)
    name = f"ddl_leftovers_{os.getpid()}"
    mark = os.environ[LEAK_MARK] if ours else "another"
    before = leftovers()
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, LEAK_MARK: mark},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        left = [one for one in leftovers(before) if name in one]
        process.communicate(timeout=40)
    assert sorted(left) == ([f"/dev/shm/{name}", f"@ddl-{name}"] if ours else [])


def raises(rank: int, say: Say) -> None:
    ddl.init()
    if rank == 1:
        raise ValueError("no more data")
    _until_lost(say)


def test_a_rank_that_raises_is_named_with_its_error() -> None:
    """The others' calls raise PeerLost; its reason is the exception, or the exit code that followed from it."""
    launch = Launch(2, raises)
    _, whom = launch.await_word(0, "lost")
    assert whom == "1"
    assert launch.close() == []


def leaves_early(rank: int, say: Say) -> None:
    ddl.init()
    if rank == 0:
        ddl.shutdown()
        return
    time.sleep(0.3)  # the other has gone: it is no fault, but a call that needs it cannot be
    try:
        ddl.allreduce(np.ones(1))
    except ddl.PeerLost as error:
        say("lost", error)
    ddl.shutdown()
    say("done")


def test_a_rank_that_left_by_shutdown_is_no_fault() -> None:
    """Only a call that needs it raises, and says that it left by itself."""
    launch = Launch(2, leaves_early)
    _, text = launch.await_word(1, "lost")
    assert "shutdown" in text
    launch.await_word(1, "done")
    assert launch.close() == []


def works_on(rank: int, say: Say) -> None:
    ddl.init()
    pair = ddl.add_process_set([0, 1])
    if rank == 2:
        ddl.shutdown()
        return
    for _ in range(50):
        assert ddl.allreduce(np.ones(3), op=ddl.Sum, process_set=pair)[0] == 2
    say("done")
    ddl.shutdown()


def test_sets_without_the_one_who_left_go_on() -> None:
    """A rank that shuts down does not disturb process sets it is not in."""
    launch = Launch(3, works_on)
    for rank in (0, 1):
        launch.await_word(rank, "done")
    assert launch.close() == []
