"""Random programs of torch.distributed on worlds of processes: every result is what it must be."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from ddl_conform.c10d.programs import play
from ddl_torch.distributed.creating import create

from tests.semantics.running import WORLDS_NEED
from tests.semantics.worlds import Spec, run_function

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason=WORLDS_NEED),
]

WORLDS = {  # of each, how many programs
    "shm/000/off/replay": 70,
    "gloo/000/off/replay": 40,
    "shm+gloo/0011/off/replay": 40,
    "shm/00/off/negotiated": 50,
}
SOAK = 25  # times as many


def _play(store: str, seeds: range, backend: str, rank: int, size: int) -> list[str]:
    if backend == "ddl":
        dist.Backend.register_backend("ddl", create, extended_api=True, devices=["cpu"])
    return play(store, seeds, backend, rank, size)


def run(world: str, folder: Path, seeds: range, backend: str = "ddl") -> None:
    """Run the programs of ``seeds`` in a world of processes, and check that nothing was wrong."""
    found = run_function(Spec.parse(world), partial(_play, str(folder / "store"), seeds, backend))
    assert [wrong[:3] for wrong in found] == [[]] * len(found)


@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(world: str, tmp_path: Path) -> None:
    """Groups overlap, calls are synchronous or not, types, shapes, operations and layouts are random; parts repeat."""
    run(world, tmp_path, range(WORLDS[world]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_random_programs(world: str, tmp_path: Path) -> None:
    for time in range(1, SOAK + 1):
        folder = tmp_path / str(time)
        folder.mkdir()
        run(world, folder, range(time * WORLDS[world], (time + 1) * WORLDS[world]))


def test_gloo_gives_the_same(tmp_path: Path) -> None:
    """What is expected of ddl is what torch's Gloo gives, as far as it has the types and operations."""
    run("shm/000/off/replay", tmp_path, range(20), "gloo")
