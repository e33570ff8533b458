"""On real processes: the parameters of any number of ranks, one life after another, and children that are no ranks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from plugins.ddl_torch.tests.launching import PROGRAMS, launch
from plugins.ddl_torch.tests.training import differences

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.slow
def test_twenty_steps_come_to_the_same(tmp_path: Path) -> None:
    """1, 2 and 4 ranks of ddl, and of torch's DDP, agree to 1e-10 in float64; ranks agree with each other exactly."""
    sizes = (1, 2, 4)
    with ThreadPoolExecutor() as pool:  # the three jobs at once: one rank alone leaves cores idle
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


def test_a_hundred_lives() -> None:
    """init and shutdown, with a collective in between, on two ranks: 100 times in less than 10 s."""
    seconds = [float(text) for text in re.findall(r"seconds ([\d.]+)", launch(2, PROGRAMS / "again.py"))]
    print("100 × init, allreduce, shutdown:", seconds, "s")
    assert len(seconds) == 2
    assert max(seconds) < 10.0


@pytest.fixture(scope="module", params=["fork", "spawn"])
def workers(request: pytest.FixtureRequest) -> str:
    """What a job of two ranks printed whose loaders' workers were made so: first they end, then a rank is killed."""
    return launch(2, PROGRAMS / "workers.py", request.param, check=False)


def test_loader_workers_are_no_ranks(workers: str) -> None:
    """A collective in one raises, and so does init; their end is nobody's death."""
    assert len(re.findall(r"\] sum 2.0", workers)) == 2, workers


def test_loader_workers_delay_no_verdict(workers: str) -> None:
    """A rank is killed whose workers live on, with all they have inherited: the other hears of it soon."""
    killed, lost = re.search(r"killed ([\d.]+)", workers), re.search(r"lost \(1,\) ([\d.]+)", workers)
    assert killed is not None, workers
    assert lost is not None, workers
    print(f"PeerLost after {float(lost[1]) - float(killed[1]):.3f} s")
    assert float(lost[1]) - float(killed[1]) < 20.0
