"""On real processes: the parameters of any number of ranks, one life after another, and children that are no ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from plugins.ddl_torch.tests.launching import PROGRAMS, launch
from plugins.ddl_torch.tests.training import differences

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_twenty_steps_come_to_the_same(tmp_path: Path) -> None:
    """1, 2 and 4 ranks of ddl, and of torch's DDP, agree to 1e-10 in float64; ranks agree with each other exactly."""
    found = {}
    for size in (1, 2, 4):
        path = tmp_path / str(size)
        launch(size, PROGRAMS / "steps.py", str(path))
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


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_workers_are_no_ranks(context: str) -> None:
    """A collective in one raises, and so does init; their end is nobody's death."""
    assert launch(2, PROGRAMS / "workers.py", context, "end").count("sum 2.0") == 2


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_workers_delay_no_verdict(context: str) -> None:
    """A rank is killed whose workers live on, with all they have inherited: the other hears of it within 2 s."""
    shown = launch(2, PROGRAMS / "workers.py", context, "kill", check=False)
    killed, lost = re.search(r"killed ([\d.]+)", shown), re.search(r"lost \(1,\) ([\d.]+)", shown)
    assert killed is not None, shown
    assert lost is not None, shown
    print(f"{context}: PeerLost after {float(lost[1]) - float(killed[1]):.3f} s")
    assert float(lost[1]) - float(killed[1]) < 2.0
