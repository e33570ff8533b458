"""The adaptive sum against the formula of the paper in float64, in worlds of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ddl_horovod.adasum import Background, adasum, name_of

from ddlcore.api import Operations, ProcessSet, add_process_set, global_process_set
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.errors import InvalidArgument, MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import World, run_world
from plugins.ddl_horovod.tests.formula import reference, summed

SHAPES = ((3, 5), (), (1,), (0, 4), (257,), (2, 2, 2))


def values(rank: int, dtype: Any = np.float64) -> list[Any]:
    random = np.random.default_rng(rank)
    return [np.asarray(random.normal(size=shape) + 0.5, dtype) for shape in SHAPES]


def expected(ranks: Sequence[int], dtype: Any = np.float64) -> list[Any]:
    each = [values(rank, dtype) for rank in ranks]
    return [summed([own[at] for own in each]) for at in range(len(SHAPES))]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-3)])
@pytest.mark.parametrize("size", range(1, 9))
def test_the_sum_is_that_of_the_paper(size: int, dtype: str, tolerance: float) -> None:
    """Each of several arrays has a sum of its own. All ranks get the same bits, and the arrays stay as they were."""

    def program(rank: int, job: Job) -> list[Any]:
        given = values(rank, dtype)
        found = adasum(given, "gradients", global_process_set, job)
        for before, now in zip(values(rank, dtype), given):
            np.testing.assert_array_equal(before, now)
        return found

    results = run_world(size, program)
    for found, wanted in zip(results[0], expected(range(size), dtype)):
        assert found.dtype == dtype and found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    for others in results[1:]:
        for found, first in zip(others, results[0]):
            assert found.tobytes() == first.tobytes()


def test_the_reference_is_the_formula() -> None:
    """Orthogonal vectors are added, equal ones are averaged, and one that is twice as long counts for less."""
    a, b = np.array([2.0, 0.0]), np.array([0.0, 1.0])
    np.testing.assert_array_equal(reference([a, b]), [2.0, 1.0])
    np.testing.assert_array_equal(reference([a, a]), a)
    np.testing.assert_array_equal(reference([a, 2 * a]), (1 - 8 / 8) * a + (1 - 8 / 32) * 2 * a)


def test_ranks_of_a_host_are_combined_first() -> None:
    """Their rank numbers do not matter. The sum of four vectors in another order is another one."""
    hosts = (1, 0, 1, 0)
    with World(4, hosts=hosts) as world:
        results = world.run(lambda rank, job: adasum(values(rank), "g", global_process_set, job))
    for found, wanted, other in zip(results[0], expected([1, 3, 0, 2]), expected(range(4))):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
        assert found.size < 2 or np.abs(found - other).max() > 1e-6


def test_members_of_a_process_set() -> None:
    """The sum is that of the members. Other ranks make no call."""

    def program(rank: int, job: Job) -> Any:
        some = add_process_set(ProcessSet([0, 2, 3]))
        return adasum(values(rank), "g", some, job) if rank != 1 else None

    for found, wanted in zip(run_world(4, program)[2], expected([0, 2, 3])):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_differs_between_ranks_is_an_error_on_all() -> None:
    """Shapes or types differ. The error names the reduction and what each rank has, and the job goes on."""

    def program(rank: int, job: Job) -> float:
        for mine in (
            np.zeros(2 + (rank == 1)),
            np.zeros(2, np.float32 if rank == 1 else np.float64),
            np.zeros((2, 1 + rank // 2)),
        ):
            with pytest.raises(MismatchError, match="allreduce 'g' with op=Adasum: shapes or types differ"):
                adasum([mine], "g", global_process_set, job)
        return float(adasum([np.ones(1)], "g", global_process_set, job)[0][0])

    assert run_world(3, program) == [1.0] * 3


def test_another_op_of_the_same_name_is_an_error_on_all() -> None:
    """One rank averages what the others combine by Adasum: nobody waits for the others, and the job goes on."""
    operations = Operations(NumpyAdapter())

    def program(rank: int, job: Job) -> float:
        mine = np.ones(4, np.float32)

        def call() -> None:
            if rank == 1:
                operations.allreduce_async(mine, name="g", job=job).wait()
            else:
                adasum([mine], "g", global_process_set, job)

        with pytest.raises(MismatchError, match=r"'allreduce\.g': the ranks disagree"):
            call()
        return float(adasum([np.ones(1)], "g", global_process_set, job)[0][0])

    assert run_world(3, program) == [1.0] * 3


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_other_types_are_refused(dtype: str) -> None:
    """The error is raised at once, on this rank, without a message to others."""

    def program(rank: int, job: Job) -> None:
        with pytest.raises(InvalidArgument, match=f"not for {dtype}"):
            adasum([np.zeros(2, dtype)], "g", global_process_set, job)

    run_world(1, program)


def test_values_that_are_not_finite_or_tiny_are_passed_on() -> None:
    """NaN stays NaN in its own array alone. Vectors whose square is 0 in float64 are added."""

    def program(rank: int, job: Job) -> list[Any]:
        own = [np.full(3, np.nan if rank == 1 else 1.0), np.full(3, 1e-170), np.zeros(3), np.ones(3)]
        return adasum(own, "g", global_process_set, job)

    broken, tiny, zero, one = run_world(2, program)[0]
    assert np.isnan(broken).all()
    np.testing.assert_allclose(tiny, 2e-170)
    np.testing.assert_array_equal(zero, 0.0)
    np.testing.assert_array_equal(one, 1.0)


def test_calls_in_the_background_may_be_awaited_in_any_order() -> None:
    """Each has a thread of its own, so none of them waits for another."""

    def program(rank: int, job: Job) -> list[Any]:
        started = []
        for at in range(6):
            name = name_of(None, job, global_process_set)

            def call(name: str = name, at: int = at) -> Any:
                return adasum([np.full(4, float(at + rank))], name, global_process_set, job)[0]

            started.append(Background(call).start())
        for handle in started[:: 1 - 2 * (rank % 2)]:
            handle.wait()
        assert all(handle.poll() for handle in started)
        return [handle.wait() for handle in started]

    for results in run_world(3, program):
        for at, found in enumerate(results):
            np.testing.assert_allclose(found, summed([np.full(4, float(at + rank)) for rank in range(3)]))


def test_an_error_in_the_background_is_raised_by_wait() -> None:
    """Each call of ``wait`` raises the error, not only the first."""
    handle = Background(lambda: 1 / 0).start()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert handle.poll()
