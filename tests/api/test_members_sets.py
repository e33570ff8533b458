"""Process sets that only their members know: how they begin, are used in replay, and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api.framework_groups import add_members_set, remove_members_set
from ddlcore.api.process_set import ProcessSet
from ddlcore.errors import InvalidArgument, MismatchError
from ddlcore.process.job import Job
from ddlcore.testing import World

pytestmark = pytest.mark.timeout(120)

SIZE = 4
STEPS = 30


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_only_the_members_call(backend: str) -> None:
    """Sets may overlap, and have the same ranks. The others hear nothing of them. In replay, no step sends a message."""

    def train(rank: int, job: Job) -> tuple[dict[int, list[int]], int]:
        mine = {label: add_members_set(ranks, label) for label, ranks in GROUPS.items() if rank in ranks}
        messages = []
        for step in range(STEPS):
            if step in (STEPS // 2, STEPS - 2):  # not at the end, when others may already remove their sets
                messages.append(ddl.stats()["control_messages"])
            # The ranks begin with different sets, and wait at the end.
            order = sorted(mine, reverse=bool(rank % 2))
            handles = {
                label: ddl.allreduce_async(_given(rank, step), op=ddl.Sum, process_set=mine[label]) for label in order
            }
            for label, handle in handles.items():
                np.testing.assert_array_equal(handle.wait(), sum(_given(one, step) for one in GROUPS[label]))
            whole = ddl.allreduce(_given(rank, step), op=ddl.Sum, name="all")
            np.testing.assert_array_equal(whole, sum(_given(one, step) for one in range(SIZE)))
        known = {key: ranks for key, ranks in ddl.process_sets().items() if key}
        for label in sorted(mine):
            remove_members_set(mine[label])
        assert list(ddl.process_sets()) == [0]
        return known, messages[1] - messages[0]

    with World(SIZE, backend=backend, settings={"replay": True}) as world:
        results = world.run(train)
    for rank, (known, sent) in enumerate(results):
        assert sorted(known.values()) == sorted(ranks for ranks in GROUPS.values() if rank in ranks)
        assert sent == 0


GROUPS = {"a": [0, 2], "b": [0, 2], "c": [1, 2, 3]}


def _given(rank: int, step: int) -> Any:
    return np.arange(3) + 10 * rank + step


def test_a_rank_that_is_no_member() -> None:
    def train(rank: int, job: Job) -> None:
        if rank == 1:
            with pytest.raises(MismatchError, match=r"rank 1 is no member of the process set \[0, 2\]"):
                add_members_set([0, 2], "others")
        one = add_members_set([0, 2], "pair") if rank in (0, 2) else None
        if one is not None:
            assert one.size() == 2 and one.rank() == rank // 2

    with World(SIZE, backend="threads") as world:
        world.run(train)


def test_members_that_differ() -> None:
    """Both ranks get the table; then they may try again."""

    def train(rank: int, job: Job) -> None:
        if rank > 1:
            return
        with pytest.raises(MismatchError, match="the ranks disagree"):
            add_members_set([0, 1] if rank == 0 else [0, 1, 2], "pair")
        one = add_members_set([0, 1], "pair")
        assert ddl.allreduce(np.ones(1), op=ddl.Sum, process_set=one)[0] == 2.0

    with World(SIZE, backend="threads") as world:
        world.run(train)


def test_a_set_that_was_removed() -> None:
    def train(rank: int, job: Job) -> None:
        one = add_members_set([0, 1], "pair") if rank < 2 else None
        if one is None:
            return
        again = ProcessSet([0, 1])
        again.process_set_id = one.process_set_id
        remove_members_set(one)
        remove_members_set(one)  # has no effect
        with pytest.raises(InvalidArgument, match="is not registered in this job"):
            ddl.allreduce(np.ones(1), process_set=again)

    with World(SIZE, backend="threads") as world:
        world.run(train)
