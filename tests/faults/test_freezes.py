"""Ranks leave replay, or stand still, at random moments inside each kind of collective: all values are exact."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import current_job
from tests.faults.exact_calls import EXACT_CALLS
from tests.faults.harness import Launch

SIZE = 3
SETTLED = 20  # steps, after which the ranks replay
NEWCOMERS = 8  # tensors that a second thread brings up, each with a name of its own
SEED = "DDL_TEST_SEED"

Say = Callable[..., None]


def play(kind: str, seed: int, rank: int, say: Say) -> None:
    """Repeat the collective ``kind``, while a second thread makes the ranks leave replay, at other moments on each rank."""
    ddl.init()
    beside = _Beside(random.Random(f"{seed} {kind} {rank}"))
    step = 0
    while True:
        EXACT_CALLS[kind](step)
        step += 1
        if step == SETTLED:
            say("replays")
            beside.start()
        goes_on = step <= SETTLED or beside.is_alive()
        if not ddl.allreduce(np.array([goes_on], np.int32), op=ddl.Max, name="goes on")[0]:
            break
    beside.join()
    if beside.error is not None:
        raise beside.error
    stats, epochs = ddl.stats(), current_job().tensor_queue.epoch
    say("ends", f"{epochs} {stats['buckets_replayed']} {stats['buckets_void']} {step}")
    ddl.shutdown()


class _Beside(threading.Thread):
    """Reduces tensors that no step has had before, with pauses."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._pauses_s = [chance.uniform(0.0, 0.1) for _ in range(NEWCOMERS)]
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for number, pause_s in enumerate(self._pauses_s):
                time.sleep(pause_s)
                got = ddl.allreduce(np.full(3, number), op=ddl.Sum, name=f"newcomer {number}")
                assert (got == SIZE * number).all(), got
        except BaseException as error:
            self.error = error


def _one_run(kind: str, seed: int, stops: int) -> tuple[int, int, int, int]:
    """Run the ranks, and ``stops`` times, let a random rank stand still for a moment.

    Return the sums, over the ranks, of the numbers that they say at the end: epochs, replayed and void buckets, steps.
    """
    chance = random.Random(f"{seed} {kind}")
    launch = Launch(SIZE, partial(play, kind, seed))
    try:
        for rank in range(SIZE):
            launch.await_word(rank, "replays")
        for _ in range(stops):
            time.sleep(chance.uniform(0.0, 0.1))
            launch.stop(chance.randrange(SIZE), chance.uniform(0.0, 0.2))
        told = [launch.await_word(rank, "ends")[1].split() for rank in range(SIZE)]
    finally:
        hung = launch.close()
    assert hung == []
    epochs, replayed, void, steps = (sum(map(int, column)) for column in zip(*told))
    return epochs, replayed, void, steps


def _freeze(runs: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = int(os.environ.get(SEED, "7"))
    rows: list[tuple[Any, ...]] = []
    for kind in EXACT_CALLS:
        found = [_one_run(kind, first + i, stops=3) for i in range(runs)]
        rows.append((kind, runs, *(sum(column) for column in zip(*found))))
    with capsys.disabled():
        print(f"\n{'kind':<14} {'runs':>4}  {'epochs':>6}  {'replayed':>8}  {'void':>4}  {'steps':>6}")
        for kind, times, epochs, replayed, void, steps in rows:
            print(f"{kind:<14} {times:>4}  {epochs:>6}  {replayed:>8}  {void:>4}  {steps:>6}")
    assert min(row[2] for row in rows) > 2 * SIZE, "no rank has left replay"
    assert min(row[3] for row in rows) > 0, "nothing was replayed"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_values_are_exact_after_freezes_inside_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """No value is wrong.

    The table shows, for each kind, how often the ranks began replay or left it, and how many buckets were void.
    """
    _freeze(1, capsys)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_values_are_exact_after_many_freezes_inside_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """Repeat the test above with thirty seeds."""
    _freeze(30, capsys)
