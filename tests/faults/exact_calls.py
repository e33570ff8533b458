"""Calls of each kind of collective that check their own results. The ranks of a test repeat one until something happens.

The tensors are large, so that a fault often happens while data moves. In an allgather and in an alltoall, the numbers of
rows differ between ranks and between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ddlcore as ddl

__all__ = ["EXACT_CALLS"]

ROWS, WIDTH = 3000, 20  # of 8 bytes each

Array = np.ndarray[Any, Any]


def _tensor(rows: int, giver: int, step: int, part: int = 0) -> Array:
    """Return the rows that rank ``giver`` gives in ``step``. ``part``: the number of the tensor within its call."""
    return np.full((rows, WIDTH), 10_000 * step + 100 * giver + part)


def _is(got: Any, wanted: Array) -> None:
    assert np.array_equal(got, wanted), (got, wanted)


def _allgather(step: int) -> None:
    given = [_tensor(_unequal(step, rank), rank, step) for rank in range(ddl.size())]
    _is(ddl.allgather(given[ddl.rank()], name="k"), np.concatenate(given))


def _unequal(step: int, rank: int) -> int:
    return ROWS * (1 + (step + rank) % 3)


def _broadcast(step: int) -> None:
    for root in range(ddl.size()):
        _is(ddl.broadcast(_tensor(ROWS, ddl.rank(), step), root, name=f"k{root}"), _tensor(ROWS, root, step))


def _alltoall(step: int) -> None:
    me, ranks = ddl.rank(), range(ddl.size())
    given = np.concatenate([_tensor(_sent(step, me, to), me, step, to) for to in ranks])
    got, counts = ddl.alltoall(given, [_sent(step, me, to) for to in ranks], name="k")
    _is(got, np.concatenate([_tensor(_sent(step, giver, me), giver, step, me) for giver in ranks]))
    _is(counts, np.array([_sent(step, giver, me) for giver in ranks]))


def _sent(step: int, giver: int, to: int) -> int:
    return ROWS * ((step + giver + 2 * to) % 3)


def _reducescatter(step: int) -> None:
    ranks = range(ddl.size())
    got = ddl.reducescatter(_tensor(ROWS * len(ranks), ddl.rank(), step), op=ddl.Sum, name="k")
    _is(got, sum([_tensor(ROWS, rank, step) for rank in ranks], np.zeros((ROWS, WIDTH), int)))


def _allreduce(step: int) -> None:
    ranks = range(ddl.size())
    got = ddl.allreduce(_tensor(ROWS, ddl.rank(), step), op=ddl.Sum, name="k")
    _is(got, sum([_tensor(ROWS, rank, step) for rank in ranks], np.zeros((ROWS, WIDTH), int)))


def _barrier(step: int) -> None:
    """Check that no rank leaves the barrier before all ranks have entered it."""
    entered_s = time.monotonic()
    ddl.barrier()
    left_s = time.monotonic()
    assert max(ddl.allgather_object(entered_s, name="entered")) <= left_s


def _object(step: int) -> None:
    objects = ["x" * ((step + rank) % 100) for rank in range(ddl.size())]
    assert ddl.allgather_object(objects[ddl.rank()], name="k") == objects


def _grouped(step: int) -> None:
    def given(rank: int) -> list[Array]:
        return [_tensor(_unequal(step, rank + part), rank, step, part) for part in range(3)]

    everyones: Sequence[Sequence[Array]] = [given(rank) for rank in range(ddl.size())]
    for got, parts in zip(ddl.grouped_allgather(everyones[ddl.rank()], name="k"), zip(*everyones)):
        _is(got, np.concatenate(parts))


EXACT_CALLS: dict[str, Callable[[int], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
    "object": _object,
    "grouped": _grouped,
}
