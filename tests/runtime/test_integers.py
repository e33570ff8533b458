"""Integers are averaged exactly, on every way that a reduction can take, and what factors mean for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ddl_conform.threads import ThreadsTransport

import ddlcore as ddl
from ddlcore.process.job import Job
from ddlcore.testing import World, run_world
from tests.runtime.integers import TYPES, check_averages, truncated

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["threads", "shm", "threads that do not scale"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, plain = request.param.partition(" ")
    if plain:
        without = replace(ThreadsTransport.capabilities, scales=False, vectored=False)
        monkeypatch.setattr(ThreadsTransport, "capabilities", without)
    return str(name)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_an_average_is_exact(backend: str, size: int, replay: bool) -> None:
    """At both ends of every type, by every verb, negotiated and replayed, for a size that divides no type's range."""

    def program(rank: int, job: Job) -> None:
        check_averages(rank, size, 6 if replay else 2)
        assert (ddl.stats()["buckets_replayed"] > 0) is replay

    with World(size, backend=backend, settings={"replay": replay}) as world:
        world.run(program)


def test_a_sum_wraps_around(backend: str) -> None:
    """As in C, on every transport."""

    def program(rank: int, job: Job) -> None:
        for dtype in TYPES:
            info = np.iinfo(dtype)
            assert (
                ddl.allreduce(np.full(5, info.max, dtype), op=ddl.Sum).tolist()
                == [-2 if info.min else info.max - 1] * 5
            )
            assert ddl.reducescatter(np.full(2, info.max, dtype), op=ddl.Sum)[0] == (-2 if info.min else info.max - 1)

    run_world(2, program, backend=backend)


FACTORS: list[tuple[dict[str, Any], list[int], int]] = [  # of two ranks: what each has, what comes
    ({"postscale_factor": 10.0}, [1, 2], 15),  # not 10: it is scaled before it is truncated
    ({"prescale_factor": 0.5}, [3, 3], 1),  # each is truncated first
    ({"prescale_factor": 2.0, "postscale_factor": 0.5}, [200, 200], 200),  # nothing is lost in between
    ({"prescale_factor": 0.5, "op": ddl.Sum}, [3, 5], 3),
    ({"postscale_factor": 0.5, "op": ddl.Sum}, [200, 200], 200),  # the sum wraps around at the very end
    ({"postscale_factor": 3.0, "op": ddl.Sum}, [100, 0], 44),
    ({"postscale_factor": 2.0, "op": ddl.Max}, [100, 7], 200),
]


@pytest.mark.parametrize(("how", "given", "expected"), FACTORS, ids=str)
def test_factors(backend: str, how: dict[str, Any], given: list[int], expected: int) -> None:
    """In float64 and truncated toward zero, each value on the way in and the exact sum on the way out, in every step."""

    def program(rank: int, job: Job) -> None:
        for _ in range(6):
            assert ddl.allreduce(np.full(4, given[rank], np.uint8), name="x", **how).tolist() == [expected] * 4
            part = ddl.reducescatter(np.full(2, given[rank], np.uint8), name="y", **how)
            assert part.tolist() == [expected]

    with World(2, backend=backend) as world:
        world.run(program)


def test_a_world_of_one_has_the_same_factors() -> None:
    """Scale factors apply without peers too; an average without factors returns the largest int64 unchanged."""

    def program(rank: int, job: Job) -> None:
        end = np.full(3, np.iinfo(np.int64).max)
        assert ddl.allreduce(end).tolist() == end.tolist()
        assert ddl.allreduce(np.full(3, -3), prescale_factor=0.5, postscale_factor=3.0).tolist() == [-3] * 3

    run_world(1, program)


def test_a_rank_that_has_joined_brings_zeros(backend: str) -> None:
    """Averages are exact: divided by the number of all ranks if the setting says so, else by that of the contributors."""

    def program(rank: int, job: Job) -> None:
        if rank == 0:
            for dtype in (np.int8, np.int64):
                ends = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, -1, 1], dtype)
                divisor = 3 if job.settings.text("join_average") == "size" else 1
                wanted = [truncated(int(end), divisor) for end in ends]
                assert ddl.allreduce(ends, name=f"x{ends.itemsize}").tolist() == wanted
                assert ddl.reducescatter(ends, name=f"y{ends.itemsize}").tolist() == wanted[:2]
        ddl.join()

    for setting in ("contributors", "size"):
        run_world(3, program, backend=backend, settings={"join_average": setting})


def test_two_of_three_contribute(backend: str) -> None:
    """Their average is exact and truncated, and that of the third is not in it."""

    def program(rank: int, job: Job) -> None:
        if rank:
            assert ddl.allreduce(np.array([3 * rank, -3 * rank]), name="x").tolist() == [4, -4]
            assert ddl.allreduce(np.full(2, np.iinfo(np.int64).max), name="y").tolist() == [np.iinfo(np.int64).max] * 2
        ddl.join()

    run_world(3, program, backend=backend)


def test_empty_and_large(backend: str) -> None:
    """No elements, and several chunks with a rest."""

    def program(rank: int, job: Job) -> None:
        for count in (0, 1, 300_001):
            array = np.arange(count, dtype=np.int64) + (2**62 if rank else 2**62 + 3)
            array += 2**61
            found = ddl.allreduce(array)
            np.testing.assert_array_equal(found, np.arange(count) + (2**62 + 2**61 + 1))

    run_world(2, program, backend=backend)
