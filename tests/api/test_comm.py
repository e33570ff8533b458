"""init(comm=[ranks]) on real processes: worlds of some ranks, in any order, one after the other, and what excludes itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ddlcore as ddl
from tests.faults.harness import Launch

pytestmark = [pytest.mark.timeout(240), pytest.mark.processes]

Say = Callable[..., None]


def halves(launched: int, say: Say) -> None:
    """Two worlds of two at once, then all four; ranks count within each world, in the order given."""
    ranks = [0, 2] if launched % 2 == 0 else [3, 1]
    ddl.init(comm=ranks)
    assert (ddl.size(), ddl.rank()) == (2, ranks.index(launched))
    assert (ddl.local_size(), ddl.local_rank()) == (2, ranks.index(launched))
    for _ in range(20):
        assert ddl.allreduce(np.full(3, launched), op=ddl.Sum, name="x")[0] == sum(ranks)
    assert ddl.allgather(np.array([launched])).tolist() == ranks
    assert ddl.broadcast(np.array([launched]), 1)[0] == ranks[1]
    ddl.shutdown()
    ddl.init()
    assert (ddl.size(), ddl.rank()) == (4, launched)
    assert ddl.allreduce(np.ones(1), op=ddl.Sum)[0] == 4
    ddl.shutdown()
    say("done")


def strangers(launched: int, say: Say) -> None:
    """Who is not in the list, and lists that cannot be."""
    for comm, words in (([1 - launched], "is not in comm"), ([0, 0], "different ranks"), ([0, 9], "between 0 and 1")):
        with pytest.raises(ValueError, match=words):
            ddl.init(comm=comm)
    with pytest.raises(ValueError, match="expected a list of ranks"):
        ddl.init(comm=object())
    ddl.init(comm=[])  # as in Horovod: everybody
    assert ddl.size() == 2
    ddl.shutdown()
    ddl.init(comm=[launched])
    assert ddl.allreduce(np.ones(2), op=ddl.Sum)[0] == 1
    ddl.shutdown()
    say("done")


def circle(launched: int, say: Say) -> None:
    """Rank 0 waits for 1, 1 for 2, 2 for 0: all are told, nobody waits for the deadline."""
    with pytest.raises(ddl.DdlInternalError, match="wait for each other in different worlds"):
        ddl.init(comm=sorted([launched, (launched + 1) % 3]))
    say("done")


@pytest.mark.parametrize(("program", "size"), [(halves, 4), (strangers, 2), (circle, 3)])
def test_worlds_of_some_ranks(program: Callable[[int, Say], None], size: int) -> None:
    """The program holds on every rank, and every process ends."""
    launch = Launch(size, program)
    try:
        for rank in range(size):
            launch.await_word(rank, "done")
    finally:
        assert launch.close() == [], [report.said for report in launch.reports]
