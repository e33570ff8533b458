"""Tests real processes: any number of ranks, repeated init and shutdown, and child processes that are not ranks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ddl_torch as ddl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ddlcore.testing import run_world
from plugins.ddl_torch.tests.launching import PROGRAMS, launch
from plugins.ddl_torch.tests.training import differences

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.long
def test_twenty_steps_come_to_the_same(tmp_path: Path) -> None:
    """1, 2 and 4 ranks of ddl and of torch's DDP agree to 1e-10 in float64, and the ranks of a job agree exactly."""
    sizes = (1, 2, 4)
    with ThreadPoolExecutor() as pool:  # run the three jobs at once, because one rank alone leaves cores idle
        list(pool.map(lambda size: launch(size, PROGRAMS / "steps.py", str(tmp_path / str(size))), sizes))
    found = {}
    for size in sizes:
        path = tmp_path / str(size)
        for way in ("ddl", "ddp"):
            ranks = [torch.load(f"{path}.{way}.{rank}") for rank in range(size)]
            assert all(differences(ranks[0], other) == 0.0 for other in ranks), f"the {size} ranks of {way} differ"
            found[way, size] = ranks[0]
    distances = {key: differences(found["ddl", 1], value) for key, value in found.items()}
    print("distance from one process:", distances)
    assert max(distances.values()) <= 1e-10


@pytest.mark.long
def test_a_hundred_lives() -> None:
    """init and shutdown with a collective in between run 100 times on two ranks, and none waits for a time limit."""
    seconds = [float(text) for text in re.findall(r"seconds ([\d.]+)", launch(2, PROGRAMS / "again.py"))]
    print("100 × init, allreduce, shutdown:", seconds, "s")
    assert len(seconds) == 2
    assert max(seconds) < 60.0  # 2 s on a free machine; a single wait of 1 s in each life would take 100 s


@pytest.fixture(scope="module", params=["fork", "spawn"])
def workers(request: pytest.FixtureRequest) -> str:
    """Return what two ranks printed whose DataLoader workers were started in this way.

    First the workers end, then a rank is killed.
    """
    return launch(2, PROGRAMS / "workers.py", request.param, check=False)


@pytest.mark.long
def test_loader_workers_are_no_ranks(workers: str) -> None:
    """A collective in a worker raises, and so does init; a worker's end does not count as the death of a rank."""
    assert len(re.findall(r"\] sum 2.0", workers)) == 2, workers


class Trying(Dataset[str]):
    """A data set whose items are the errors that collectives raise in a worker of a DataLoader."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        try:
            if index == 0:
                ddl.allreduce(torch.ones(1))
            else:
                ddl.barrier()
        except RuntimeError as error:
            return str(error)
        return "no error"


def test_a_collective_in_a_forked_loader_worker_raises() -> None:
    """The error says who may call collectives. The rank that has started the worker goes on."""

    def play(rank: int, job: Any) -> tuple[list[str], float]:
        errors: list[str] = []
        if rank == 0:
            errors += DataLoader(Trying(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60.0)
        return errors, ddl.allreduce(torch.ones(1), op=ddl.Sum).item()

    (errors, one), (_, other) = run_world(2, play)
    assert len(errors) == 2
    for error in errors:
        assert "forked from rank 0; only the process that called init() takes part" in error
    assert (one, other) == (2.0, 2.0)


@pytest.mark.long
def test_loader_workers_delay_no_verdict(workers: str) -> None:
    """If a rank is killed and its workers live on with its sockets, the other rank still learns of it soon."""
    killed, lost = re.search(r"killed ([\d.]+)", workers), re.search(r"lost \(1,\) ([\d.]+)", workers)
    assert killed is not None, workers
    assert lost is not None, workers
    print(f"PeerLost after {float(lost[1]) - float(killed[1]):.3f} s")
    assert float(lost[1]) - float(killed[1]) < 20.0
