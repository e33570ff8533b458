"""Averages with weights, by the verbs for numpy arrays: sum(w * x) / sum(w), for every type and in replay."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api import checked_weight
from ddlcore.process.job import Job
from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(240)

SIZE = 3
WEIGHTS = ([1, 2, 5], [4096, 1, 0], [0.25, 0.5, 0.25], [0, 0, 7])
DTYPES = {np.float16: 2e-3, ml_dtypes.bfloat16: 1.6e-2, np.float32: 1e-6, np.float64: 1e-13}


@pytest.fixture(params=["threads", "shm"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def values(rank: int, dtype: Any) -> Any:
    return (np.random.default_rng(rank).normal(size=(4, 3)) * 30).astype(dtype)


def expected(weights: list[float], dtype: Any) -> Any:
    """In float64, of what the ranks have."""
    total = sum(w * values(rank, dtype).astype(np.float64) for rank, w in enumerate(weights))
    return total / sum(weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_verb_agrees_with_float64(dtype: Any, weights: list[float], backend: str) -> None:
    """Plain weights and shares; new arrays, in place and in groups; the types stay."""
    wanted = expected(weights, dtype)

    def near(found: Any) -> None:
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype] * 30)

    def program(rank: int, job: Job) -> None:
        share = ddl.Share(weights[rank], sum(weights), SIZE)
        for weight in (weights[rank], share):
            x = values(rank, dtype)
            near(ddl.allreduce(x, weight=weight))
            near(ddl.allreduce_async(x, name="a", weight=weight).wait())
            one, other = ddl.grouped_allreduce([x, x], weight=weight)
            near(one)
            near(other)
            into = x.copy()
            assert ddl.allreduce_(into, weight=weight) is into
            near(into)
            into = x.copy()
            near(ddl.synchronize(ddl.allreduce_async_(into, weight=weight)))
            near(into)
            pair = [x.copy(), x.copy()]
            assert ddl.grouped_allreduce_(pair, weight=weight)[1] is pair[1]
            near(pair[1])
            assert (x == values(rank, dtype)).all(), "the argument is only read"

    run_world(SIZE, program, backend=backend)


def test_values_of_weight_zero_count_nothing() -> None:
    """Even if they are NaN, as the mean over no token is."""

    def program(rank: int, job: Job) -> None:
        x = np.full(2, 6.0 if rank else np.nan)
        assert ddl.allreduce(x, weight=rank).tolist() == [6.0, 6.0]
        assert ddl.allreduce(x, weight=ddl.Share(rank, 1, 2)).tolist() == [6.0, 6.0]

    run_world(2, program)


def test_all_weights_zero_is_an_error_on_all_ranks() -> None:
    """Nobody gets NaN, and the world goes on."""

    def program(rank: int, job: Job) -> None:
        x = np.ones(2)
        with pytest.raises(ddl.InvalidArgument, match="weights of all ranks are 0"):
            ddl.allreduce_(x, weight=0)
        assert x.tolist() == [1.0, 1.0]
        assert ddl.allreduce(np.full(2, rank), op=ddl.Sum).tolist() == [1, 1]

    run_world(2, program)


WRONG = [
    (-1, "not negative"),
    (float("nan"), "finite"),
    (float("inf"), "finite"),
    ("3", "is a str"),
    (True, "is a bool"),
    (np.ones(2), "one number"),
    (ddl.Share(1, 4, 3), "for 3 ranks"),
]


def test_wrong_weights_are_refused_where_they_are_given() -> None:
    """Nothing is sent: the next call pairs up."""

    def program(rank: int, job: Job) -> None:
        x = np.ones(2)
        if rank == 0:
            for weight, text in WRONG:
                with pytest.raises(ddl.InvalidArgument, match=text):
                    ddl.allreduce(x, weight=weight)
            for more, text in (
                ({"op": ddl.Sum}, "op=Sum"),
                ({"op": ddl.Max}, "op=Max"),
                ({"prescale_factor": 2.0}, "prescale_factor=2.0"),
                ({"compression": "fp16"}, "compression='fp16'"),
            ):
                with pytest.raises(ddl.InvalidArgument, match=text):
                    ddl.allreduce(x, weight=1, **more)
            with pytest.raises(ddl.InvalidArgument, match="not int64"):
                ddl.allreduce(np.ones(2, np.int64), weight=1)
            with pytest.raises(ddl.InvalidArgument, match="read-only"):
                ddl.allreduce_(np.broadcast_to(x, (2,)), weight=1)
        assert ddl.allreduce(x, weight=1 + rank).tolist() == [1.0, 1.0]

    run_world(2, program)


def test_what_cannot_be_a_share() -> None:
    """More rows than the total, nothing at all, numbers that are none."""
    for rows, total, size in ((5, 4, 2), (-1, 4, 2), (0, 0, 2), (1, 4, 0), (float("nan"), 4, 2)):
        with pytest.raises(ddl.InvalidArgument):
            ddl.Share(rows, total, size)
    assert checked_weight(np.float32(2), 2) == checked_weight(np.array(2), 2) == 2.0
    assert ddl.Share(1, 4, 2).factor == 0.25


def test_one_rank_with_a_share_and_one_without() -> None:
    """They are told apart: no wrong value, no wait."""

    def program(rank: int, job: Job) -> None:
        weight: Any = ddl.Share(1, 2, 2) if rank else 1
        with pytest.raises(ddl.MismatchError, match="an average by"):
            ddl.grouped_allreduce([np.ones(2)], name="x", weight=weight)

    run_world(2, program)


def test_steady_steps_send_nothing() -> None:
    """Weights that change in each step leave replay as it is (until a rank leaves, at the end)."""

    def program(rank: int, job: Job) -> int:
        counts = []
        for step in range(40):
            x = np.full(9, float(rank))
            found = ddl.allreduce(x, name="x", weight=step + rank)
            assert found[0] == pytest.approx((step + 1) / (2 * step + 1))
            counts.append(job.stats()["control_messages"])
        return counts[-3] - counts[15]

    assert run_world(2, program, settings={"replay": True}) == [0, 0]


def test_a_rank_that_has_joined_has_no_weight(backend: str) -> None:
    """The weights of the others are those that divide; shares, which would not add up, are refused."""

    def program(rank: int, job: Job) -> None:
        if rank < 2:
            assert ddl.allreduce(np.full(3, 4.0 * rank), weight=1 + 2 * rank).tolist() == [3.0] * 3
            with pytest.raises(ddl.MismatchError, match="rank 2 has joined, so the shares"):
                ddl.allreduce(np.ones(3), weight=ddl.Share(1, 3, 3))
        ddl.join()

    run_world(3, program, backend=backend)
