"""Sparse tensors are gathered: what ranks store may differ, and repeated indices add up."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import run_world

SIZE = 3


def stored(rank: int) -> torch.Tensor:
    """(5, 2), of which rank r stores r rows: 0 … r - 1, each twice."""
    rows = [row for row in range(rank) for _ in range(2)]
    values = torch.full((len(rows), 2), float(rank))
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, (5, 2), check_invariants=True)


@pytest.mark.parametrize("op", [ddl.Average, ddl.Sum])
@pytest.mark.parametrize("name", [None, "rows"])
def test_sum_and_average(op: int, name: str | None) -> None:
    """What the dense tensors give; one rank has nothing to store. The handle is callable, as scripts expect."""

    def play(rank: int, job: Any) -> None:
        handle = ddl.sparse_allreduce_async(stored(rank), name, op)
        found = handle()
        assert handle.poll()
        assert found.is_sparse
        expected = ddl.allreduce(stored(rank).to_dense(), op=op)
        assert torch.equal(found.to_dense(), expected) or torch.allclose(found.to_dense(), expected)
        assert torch.equal(ddl.synchronize(handle).to_dense(), found.to_dense())

    run_world(SIZE, play)


def test_two_sparse_dimensions() -> None:
    """Indices are columns, whatever their number."""

    def play(rank: int, job: Any) -> Any:
        one = torch.sparse_coo_tensor(
            torch.tensor([[rank], [rank + 1]]), torch.tensor([1.0]), (3, 4), check_invariants=True
        )
        return ddl.sparse_allreduce_async(one, "x", ddl.Sum)().to_dense().nonzero().tolist()

    assert run_world(SIZE, play) == [[[0, 1], [1, 2], [2, 3]]] * SIZE


def test_refusals() -> None:
    """Dense tensors, and operations that have no meaning here."""

    def play(rank: int, job: Any) -> None:
        with pytest.raises(ValueError, match="use allreduce_async"):
            ddl.sparse_allreduce_async(torch.ones(3), "x", ddl.Sum)
        with pytest.raises(ValueError, match="op=Max"):
            ddl.sparse_allreduce_async(stored(1), "x", ddl.Max)

    run_world(1, play)


def test_a_first_gradient_that_is_sparse_on_one_rank_alone() -> None:
    """The other rank cannot know that it would be sparse, and sends zeros: an error on both that says what to do."""

    def play(rank: int, job: Any) -> None:
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1), table.named_parameters())
        if rank == 0:
            table(torch.tensor([1, 3])).sum().backward()
        with pytest.raises(ddl.DdlInternalError, match="sparse_as_dense"):
            optimizer.step()

    run_world(2, play)
