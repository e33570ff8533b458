"""``verify`` of numpy arrays: silent where they are alike to the last bit, else one error on every member."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore import api
from ddlcore.testing import run_world


def caught(arrays: Any, process_set: Any = ddl.global_process_set) -> ddl.ReplicasDiffer:
    with pytest.raises(ddl.ReplicasDiffer) as info:
        ddl.verify(arrays, process_set)
    return info.value


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_alike_to_the_last_bit(backend: str) -> None:
    """Dicts, pairs and bare arrays of any layout and type, NaN among them; on both transports of one host."""

    def rank(rank: int, job: api.Job) -> None:
        whole = np.arange(24, dtype=np.float64).reshape(4, 6)
        odd = np.array([1.0, float("nan"), -0.0], np.float16)
        ddl.verify({"whole": whole if rank else np.asfortranarray(whole), "odd": odd})
        ddl.verify([("a", whole[::2]), ("b", np.array(True))])
        ddl.verify([whole, odd])
        ddl.verify([])

    run_world(3, rank, backend=backend)


def test_a_difference_is_raised_on_every_rank() -> None:
    """The first tensor that differs, the ranks on each side, and how far each is from the lowest; the job goes on."""

    def rank(rank: int, job: api.Job) -> None:
        arrays: dict[str, Any] = {"same": np.ones(3), "w": np.zeros(1000, np.float32), "later": np.full(2, rank)}
        if rank == 2:
            arrays["w"][977] = -0.25
        error = caught(arrays)
        assert (error.tensor, error.groups) == ("w (float32 1000)", ((0, 1), (2,)))
        assert error.distances == {2: 0.25}
        assert "1 more differs" in str(error)
        ddl.verify([arrays["same"]])
        assert ddl.allreduce(np.ones(1), op=ddl.Sum) == 3

    run_world(3, rank)


def test_equal_names_are_told_apart() -> None:
    """A difference in the first of two tensors of one name is found as well."""

    def rank(rank: int, job: api.Job) -> None:
        assert caught([("a", np.full(2, rank)), ("a", np.zeros(2, np.int64))]).tensor == "a (int64 2)"

    run_world(2, rank)


def test_bits_count_not_values() -> None:
    """-0.0 is not 0.0, though their distance is 0; one NaN among numbers has no distance."""

    def rank(rank: int, job: api.Job) -> None:
        error = caught([np.array([-0.0 if rank else 0.0])])
        assert error.distances == {}
        error = caught([np.array([float("nan") if rank else 0.0])])
        assert np.isnan(error.distances[1])

    run_world(2, rank)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda rank: {"a": np.ones(2), **({} if rank else {"b": np.ones(2)})}, "2 tensors"),
        (lambda rank: {f"a{rank}": np.ones(2)}, "a1 "),
        (lambda rank: {"a": np.ones(2 + rank)}, "float64 3"),
        (lambda rank: {"a": np.ones(2, np.float32 if rank else np.float64)}, "float32 2"),
    ],
    ids=["number", "names", "shapes", "types"],
)
def test_other_tensors_are_a_named_error(mine: Any, words: str) -> None:
    """Nobody hangs where the ranks do not have the same tensors."""

    def rank(rank: int, job: api.Job) -> None:
        error = caught(mine(rank))
        assert words in str(error)
        assert error.tensor == ""

    run_world(2, rank)


def test_members_of_a_process_set_compare_by_themselves() -> None:
    """What the other ranks have does not count; a set of one has nothing to compare."""

    def rank(rank: int, job: api.Job) -> None:
        pair = ddl.add_process_set([0, 2])
        alone = ddl.add_process_set([1])
        if rank != 1:
            ddl.verify([np.ones(3)], pair)
            assert caught([np.full(3, rank)], pair).groups == ((0,), (2,))
        else:
            ddl.verify([np.zeros(3)], alone)

    run_world(3, rank)


def test_what_is_no_array_is_refused_here() -> None:
    """A wrong argument is a ValueError before anything is sent."""

    def rank(rank: int, job: api.Job) -> None:
        for wrong in (7, "text", {"a": object()}):
            with pytest.raises(ValueError, match="verify"):
                ddl.verify(wrong)

    run_world(2, rank)
