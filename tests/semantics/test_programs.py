"""Generated training programs come to the same on the ranks of a world as in one process, gradient by gradient."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.semantics.choices import Drawn
from tests.semantics.program import make
from tests.semantics.running import WORLDS_NEED, run_module
from tests.semantics.worlds import Spec, run_in_threads, warm_up

# Each kind of world with how many programs the suite runs in it. With those on threads, these are 250.
PROCESSES = {
    "shm/00/off/replay": 80,
    "shm/000/on/replay": 55,
    "shm/00/on/negotiated": 20,
    "gloo/00/on/replay": 30,
    "shm+gloo/0011/on/replay": 25,
    "shm+gloo/011/off/replay": 25,
}
# Where a signal strikes depends on the clock, so these belong to the long run alone.
INTERRUPTED = (
    "shm/00/off/replay/interrupts",
    "shm/00/on/replay/interrupts",
)
THREADS = (
    "threads/00/off/replay",
    "threads/000/on/replay",
    "threads+threads/0011/off/negotiated",
    "threads/0/on/replay",
)
ALL_S = 1500.0  # for all of them; some 40 s where the machine has nothing else to do
SOAKED = 5000
SEED = "DDL_SEMANTICS_SEED"  # of a soak

forks = pytest.mark.skipif(sys.platform != "linux", reason=WORLDS_NEED)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The ranks of a world of threads are threads already."""
    before = torch.get_num_threads()
    warm_up()
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(600)
@given(st.sampled_from(THREADS), st.data())
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
def test_programs_on_threads(world: str, data: st.DataObject) -> None:
    """In worlds of threads; hypothesis shows the shortest program that fails."""
    spec = Spec.parse(world)
    program = make(Drawn(data.draw), spec.surroundings)
    note(f"{world}\n{program}")
    wrong = run_in_threads(spec, [program])
    assert not wrong, wrong


@pytest.fixture(scope="module")
def reports() -> tuple[dict[str, dict[str, Any]], str]:
    """What was found in each kind of world, and what was said of it; one process, for importing torch takes longest."""
    worlds = [f"{spec}@0-{count - 1}" for spec, count in PROCESSES.items()]
    found, told = run_module("worlds", *worlds, timeout_s=ALL_S)
    return {line["spec"]: line for line in found}, told


@pytest.mark.processes
@pytest.mark.long
@forks
@pytest.mark.timeout(ALL_S + 60)  # the first waits for all
@pytest.mark.parametrize("world", PROCESSES)
def test_programs_on_processes(world: str, reports: tuple[dict[str, dict[str, Any]], str]) -> None:
    """In worlds of processes, with the same seeds each time; the report names the seed and prints the program."""
    found, told = reports
    assert world in found, told
    print(found[world])
    assert not found[world]["failed"], told
    assert found[world]["programs"] == PROCESSES[world]
    assert (found[world]["replayed"] > 0) == ("/replay" in world), "this was to run in replay, or was not to"


@pytest.mark.soak
@pytest.mark.processes
@forks
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", [*PROCESSES, *INTERRUPTED, *THREADS])
def test_many_programs(world: str) -> None:
    """As above, with seeds that differ from run to run; DDL_SEMANTICS_SEED repeats one."""
    first = int(os.environ.get(SEED, random.randrange(10**9)))
    count = SOAKED // (len(PROCESSES) + len(INTERRUPTED) + len(THREADS)) + 1
    print(f"{SEED}={first}")
    lines, told = run_module("worlds", world, "--seeds", f"{first}-{first + count - 1}", timeout_s=7000.0)
    print(*lines, sep="\n")
    assert len(lines) == 1 and not lines[0]["failed"], f"{SEED}={first}\n{told}"
    assert lines[0]["programs"] == count
