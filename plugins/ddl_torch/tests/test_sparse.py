"""Sparse tensors are gathered: ranks may store different entries, and entries of equal indices add up."""

from __future__ import annotations

import threading
from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import run_world

SIZE = 3


def stored(rank: int) -> torch.Tensor:
    """Return a tensor of shape (5, 2), of which rank r stores the r rows 0 … r - 1, each twice."""
    rows = [row for row in range(rank) for _ in range(2)]
    values = torch.full((len(rows), 2), float(rank))
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, (5, 2), check_invariants=True)


@pytest.mark.parametrize("op", [ddl.Average, ddl.Sum])
@pytest.mark.parametrize("name", [None, "rows"])
def test_sum_and_average(op: int, name: str | None) -> None:
    """The result equals that of the dense tensors, even if one rank stores nothing.

    The handle is callable, as scripts expect.
    """

    def play(rank: int, job: Any) -> None:
        handle = ddl.sparse_allreduce_async(stored(rank), name, op)
        found = handle()
        assert handle.poll()
        assert found.is_sparse
        expected = ddl.allreduce(stored(rank).to_dense(), op=op)
        assert torch.equal(found.to_dense(), expected) or torch.allclose(found.to_dense(), expected)
        assert torch.equal(ddl.synchronize(handle).to_dense(), found.to_dense())

    run_world(SIZE, play)


def test_an_average_after_join() -> None:
    """It divides by the ranks that contribute entries, as that of dense tensors does."""

    def play(rank: int, job: Any) -> None:
        if rank:
            for dtype, wanted in ((torch.float64, [2.5, 1.5]), (torch.int64, [2, 1])):
                values = torch.tensor([float(rank + 1), float(rank)], dtype=dtype)
                one = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (3,), check_invariants=True)
                found = ddl.sparse_allreduce_async(one, f"x {dtype}", ddl.Average)().to_dense()
                assert found.tolist() == [*wanted, 0]
        ddl.join()

    run_world(SIZE, play)


def test_two_sparse_dimensions() -> None:
    """Tensors with two sparse dimensions are reduced too."""

    def play(rank: int, job: Any) -> Any:
        one = torch.sparse_coo_tensor(
            torch.tensor([[rank], [rank + 1]]), torch.tensor([1.0]), (3, 4), check_invariants=True
        )
        return ddl.sparse_allreduce_async(one, "x", ddl.Sum)().to_dense().nonzero().tolist()

    assert run_world(SIZE, play) == [[[0, 1], [1, 2], [2, 3]]] * SIZE


def test_refusals() -> None:
    """Dense tensors and unsupported operations are refused."""

    def play(rank: int, job: Any) -> None:
        with pytest.raises(ValueError, match="use allreduce_async"):
            ddl.sparse_allreduce_async(torch.ones(3), "x", ddl.Sum)
        with pytest.raises(ValueError, match="op=Max"):
            ddl.sparse_allreduce_async(stored(1), "x", ddl.Max)
        large = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2**64 - 1], dtype=torch.uint64), (3,))
        with pytest.raises(ValueError, match="average of sparse uint64"):
            ddl.sparse_allreduce_async(large, "x", ddl.Average)

    run_world(1, play)


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_tables_that_different_ranks_do_not_use_at_first(
    overlap: str, as_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank must send several gradients again. The ranks find that out in different orders and do not block each other."""
    monkeypatch.setenv("DDL_OVERLAP", overlap)

    def play(rank: int, job: Any) -> list[float]:
        tables = [torch.nn.Embedding(5, 2, sparse=True) for _ in range(4)]
        for number, table in enumerate(tables):
            torch.nn.init.constant_(table.weight, number)
        named = [(f"table{number}", table.weight) for number, table in enumerate(tables)]
        optimizer: Any = ddl.DistributedOptimizer(
            torch.optim.SGD([param for _, param in named], 0.1), named, sparse_as_dense=as_dense
        )
        for step in range(6):
            optimizer.zero_grad()
            used = tables if step > 2 else [table for number, table in enumerate(tables) if number % 2 == rank]
            torch.stack([table(torch.tensor([1, 3])).sum() for table in used[:: 1 - 2 * rank]]).sum().backward()
            optimizer.step()
        return [one for _, param in named for one in param.detach().flatten().tolist()]

    results = run_world(2, play)
    assert results[0] == results[1]
    # Row 1 of each table gets a gradient of 1 from one of two ranks in three steps, and from both in three more.
    assert results[0][2::10] == pytest.approx([number - 0.1 * (3 * 0.5 + 3) for number in range(4)])


@pytest.mark.parametrize("first", [0, 3], ids=["in the first step", "in a later step"])
def test_a_backward_that_fails_on_one_of_three_ranks(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for a sparse gradient that does not come, whether the failing rank knows that it is sparse or not.

    One of the other ranks has a sparse gradient of the table, the other has none and takes part with zeros.
    """
    monkeypatch.setenv("DDL_OVERLAP", "on")

    def play(rank: int, job: Any) -> list[float]:
        table = torch.nn.Embedding(5, 2, sparse=True)
        weight = torch.nn.Parameter(torch.ones(2))
        torch.nn.init.ones_(table.weight)
        params = [table.weight, weight]
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD(params, 0.1), [("table", params[0]), ("w", weight)])
        planted = {"fails": False}

        def fail(_: torch.Tensor) -> None:
            if planted["fails"]:
                raise ArithmeticError("planted")

        for step in range(6):
            x = torch.ones(2) if rank == 1 and step == first else table(torch.tensor([1, 3])).sum(0)
            if rank == 0:
                x.register_hook(fail)  # ``w`` has its gradient then, and the table has not
            loss = (x * weight).sum()
            planted["fails"] = rank == 0 and step == first
            if step != first:
                loss.backward()
            elif rank == 0:
                with pytest.raises(ArithmeticError):
                    loss.backward()
                with pytest.raises(ddl.IncompleteGradients):
                    optimizer.synchronize()
            else:
                with pytest.raises(ddl.MismatchError, match="a backward pass that did not come to its end"):
                    loss.backward()
            if step != first:
                optimizer.step()
            optimizer.zero_grad()
        return [*table.weight.detach().flatten().tolist(), *weight.tolist()]

    results = run_world(3, play)
    assert results[0] == results[1] == results[2]
    assert results[0][2] == results[0][6] < 1.0
    assert results[0][0] == 1.0


def test_an_interrupt_while_a_failed_step_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose backward has failed tells the others once, however often its ``synchronize()`` is interrupted."""
    monkeypatch.setenv("DDL_OVERLAP", "on")
    met = threading.Barrier(2)

    def play(rank: int, job: Any) -> list[float]:
        table = torch.nn.Embedding(5, 2, sparse=True)
        first, weight = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        torch.nn.init.ones_(table.weight)
        named = [("table", table.weight), ("first", first), ("w", weight)]
        optimizer: Any = ddl.DistributedOptimizer(torch.optim.SGD([one for _, one in named], 0.1), named)

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError("planted")

        x = table(torch.tensor([1, 3])).sum(0) * first
        if rank == 0:
            x.register_hook(fail)  # ``w`` has its gradient then, and the others have not
            with pytest.raises(ArithmeticError):
                (x * weight).sum().backward()
            monkeypatch.setattr("ddl_torch.reducer.wait", strike)
            with pytest.raises(KeyboardInterrupt):
                optimizer.synchronize()
            monkeypatch.undo()
            met.wait(60)  # only now the other rank asks, so that what was sent is still in flight
            with pytest.raises(ddl.IncompleteGradients):
                optimizer.synchronize()
        else:
            met.wait(60)
            with pytest.raises(ddl.MismatchError, match="a backward pass that did not come to its end"):
                (x * weight).sum().backward()
        for _ in range(3):
            optimizer.zero_grad()
            (table(torch.tensor([1, 3])).sum(0) * first * weight).sum().backward()
            optimizer.step()
        return [*table.weight.detach().flatten().tolist(), *weight.tolist()]

    def strike(sender: Any) -> None:
        raise KeyboardInterrupt

    results = run_world(2, play)
    assert results[0] == results[1]
    assert results[0][2] < 1.0


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("first", [0, 2])
def test_a_table_that_some_rank_does_not_use_at_first(first: int, kind: Any, as_dense: bool) -> None:
    """If a rank does not know that its gradient would be sparse, the ranks find out and train alike.

    ``first``: the step in which a rank uses the table for the first time; before it, all ranks take part with zeros.
    """

    def play(rank: int, job: Any) -> list[float]:
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 2, sparse=True)
        bias = torch.nn.Parameter(torch.ones(2))
        with torch.no_grad():
            table.weight.copy_(torch.linspace(-1, 1, 10).view(5, 2))
        sparse: Any = ddl.DistributedOptimizer(
            kind(table.parameters(), 0.1), table.named_parameters(), sparse_as_dense=as_dense
        )
        dense: Any = ddl.DistributedOptimizer(torch.optim.SGD([bias], 0.1), [("bias", bias)])
        for step in range(6):
            sparse.zero_grad()
            dense.zero_grad()
            out = bias * (rank + 1)
            if rank == 0 and step >= first:
                out = out * table(torch.tensor([1, 3]))
            out.sum().backward()
            sparse.step()
            dense.step()
        return [*table.weight.detach().flatten().tolist(), *bias.detach().tolist()]

    results = run_world(2, play)
    assert results[0] == results[1]
    assert results[0][:2] != results[0][2:4]
    begun = torch.linspace(-1, 1, 10).tolist()
    assert results[0][:2] == begun[:2], "nobody has used this row"
    assert results[0][2:4] != begun[2:4]


def test_a_table_that_is_dense_on_another_rank_is_an_error() -> None:
    """If the ranks' modules differ in ``sparse``, both ranks raise an error that says what to do."""

    def play(rank: int, job: Any) -> None:
        table = torch.nn.Embedding(5, 2, sparse=rank == 0)
        optimizer = ddl.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1), table.named_parameters())
        with pytest.raises(ddl.DdlInternalError):
            table(torch.tensor([1, 3])).sum().backward()
        del optimizer  # its hooks are removed with it

    run_world(2, play)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_an_average_of_integers_is_exact(dtype: torch.dtype) -> None:
    """The average is exact at the limits of the type and for repeated indices, and truncated after the sum."""
    info = torch.iinfo(dtype)
    own = [[info.max, info.min, 1, info.min + 1], [info.max, info.min, 1, 0], [info.max, info.min, 0, 0]]

    def play(rank: int) -> list[int]:
        indices, values = torch.tensor([[0, 1, 2, 3]]), torch.tensor(own[rank], dtype=dtype)
        mean = ddl.sparse_allreduce_async(torch.sparse_coo_tensor(indices, values, (4,)), "x", ddl.Average)()
        assert mean.dtype is dtype
        found: list[int] = mean.to_dense().tolist()
        return found

    sums = [sum(each) for each in zip(*own, strict=True)]
    expected = [abs(one) // 3 * (1 if one >= 0 else -1) for one in sums]
    assert run_world(3, lambda rank, job: play(rank)) == [expected] * 3
