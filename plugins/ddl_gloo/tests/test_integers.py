"""Averages of integers are exact where Gloo adds them, alone and across hosts."""

from __future__ import annotations

import pytest

from ddlcore.process.job import Job
from ddlcore.testing import World
from tests.runtime.integers import check_averages

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("backend", "hosts"), [("gloo", [0, 0, 0]), ("shm+gloo", [0, 0, 1])], ids=["gloo", "by hosts"])
def test_an_average_is_exact(backend: str, hosts: list[int]) -> None:
    """The sums within and between hosts are exact, and the result is divided only once."""

    def program(rank: int, job: Job) -> None:
        check_averages(rank, 3, 5)
        assert job.stats()["buckets_replayed"] > 0

    with World(3, backend=backend, hosts=hosts) as world:
        world.run(program)
