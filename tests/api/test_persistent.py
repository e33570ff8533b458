"""A described allreduce that leaves its input alone, and says what it is a part of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddlcore.api import Operations
from ddlcore.builtin.numpy_adapter import NumpyAdapter
from ddlcore.errors import MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import run_world
from ddlcore.types import Sum

OPERATIONS = Operations(NumpyAdapter())


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_result_goes_to_the_output_which_may_change_between_starts() -> None:
    def play(rank: int, job: Job) -> list[float]:
        tensor = np.full(100, rank + 1.0)
        outputs = [np.zeros(100), np.zeros(100)]
        entry = OPERATIONS.persistent_allreduce(tensor, name="x", op=Sum, output=outputs[0])
        found = []
        for step in range(60):
            output = outputs[step % 2]
            output[:] = 0
            entry.set_target(address(output), output)
            job.start_request(entry, address(tensor), tensor)
            entry.wait()
            assert (tensor == rank + 1.0).all()
            assert len(set(output)) == 1
            found.append(float(output[0]))
        assert job.stats()["buckets_replayed"] > 0
        return found

    assert run_world(2, play) == [[3.0] * 60] * 2


def test_an_output_of_another_shape_is_refused() -> None:
    def play(rank: int, job: Job) -> None:
        with pytest.raises(ValueError, match="output has shape"):
            OPERATIONS.persistent_allreduce(np.zeros(3), name="x", output=np.zeros(4))

    run_world(1, play)


def test_ranks_that_say_different_wholes_learn_what_each_said() -> None:
    def play(rank: int, job: Job) -> str:
        tensor = np.ones(3)
        entry = OPERATIONS.persistent_allreduce(tensor, name="x", part_of=f"{5 + rank} gradients")
        job.start_request(entry, address(tensor), tensor)
        with pytest.raises(MismatchError) as caught:
            entry.wait()
        return str(caught.value)

    for text in run_world(2, play):
        assert "part of" in text and "5 gradients" in text and "6 gradients" in text
