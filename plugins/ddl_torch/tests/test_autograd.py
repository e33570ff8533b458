"""The gradient of every collective follows the rules in ddl_torch.autograd; the expected sums are written by hand."""

from __future__ import annotations

from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import run_world

SIZE = 3


def gradients(function: Any, *, size: int = SIZE) -> list[list[float]]:
    """Return d loss / d x for each rank, where ``function(rank, x)`` gives the loss of a rank for its x of 6 rows."""

    def play(rank: int, job: Any) -> list[float]:
        x = torch.arange(1.0, 7.0).mul(rank + 1).requires_grad_()
        function(rank, x).backward()
        assert x.grad is not None
        return [round(value, 4) for value in x.grad.tolist()]

    return run_world(size, play)


def weights(rank: int, rows: int = 6) -> torch.Tensor:
    """Return the weight of each row in a rank's loss."""
    return torch.arange(1.0, rows + 1) * float(10**rank)


TOTAL = [111.0 * row for row in range(1, 7)]  # the weights of all ranks, summed


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1 / SIZE),
        ({"op": ddl.Sum}, 1.0),
        ({"op": ddl.Sum, "prescale_factor": 2.0, "postscale_factor": 3.0}, 6.0),
        ({"compression": ddl.Compression.bf16, "op": ddl.Sum}, 1.0),
        ({"name": "named"}, 1 / SIZE),
    ],
    ids=["average", "sum", "scaled", "compressed", "named"],
)
def test_allreduce(options: dict[str, Any], factor: float) -> None:
    """The gradient of allreduce is an allreduce with the same op and scales."""
    found = gradients(lambda rank, x: (ddl.allreduce(x, **options) * weights(rank)).sum())
    tolerance = 0.01 if "compression" in options else 1e-4
    for one in found:
        assert one == pytest.approx([value * factor for value in TOTAL], rel=tolerance)


def test_grouped_allreduce() -> None:
    """Each tensor of a group gets its gradient as in allreduce; a tensor without influence on the loss gets zeros."""

    def loss(rank: int, x: torch.Tensor) -> Any:
        first, second, _ = ddl.grouped_allreduce([x, 2 * x, x * 5], name="g", op=ddl.Sum)
        return (first * weights(rank)).sum() + (second * weights(rank)).sum()

    assert gradients(loss) == [[3 * value for value in TOTAL]] * SIZE


def test_allgather() -> None:
    """The gradient is the average of the gradients of this rank's rows; ranks give different numbers of rows."""

    def loss(rank: int, x: torch.Tensor) -> Any:
        gathered = ddl.allgather(x[: rank + 1], name="rows")  # (1 + 2 + 3,)
        return (gathered * weights(rank)).sum()

    mean = [value / SIZE for value in TOTAL]
    assert gradients(loss) == [[*mean[:1], 0, 0, 0, 0, 0], [*mean[1:3], 0, 0, 0, 0], [*mean[3:], 0, 0, 0]]


def test_grouped_allgather() -> None:
    """Each tensor of a group gets the gradients of its own rows."""

    def loss(rank: int, x: torch.Tensor) -> Any:
        one, two = ddl.grouped_allgather([x[:2], x[2 : 3 + rank]])
        return (one * weights(rank)).sum() + 1000 * (two * weights(rank)).sum()

    mean = [value / SIZE for value in TOTAL]
    thousand = [1000 * value for value in mean]
    assert gradients(loss) == [
        [*mean[:2], *thousand[:1], 0, 0, 0],
        [*mean[2:4], *thousand[1:3], 0, 0],
        [*mean[4:], *thousand[3:], 0],
    ]


def test_broadcast() -> None:
    """The root gets the average of all gradients, and the other ranks get zero."""
    found = gradients(lambda rank, x: (ddl.broadcast(x, 1) * weights(rank)).sum())
    assert found == [[0.0] * 6, [value / SIZE for value in TOTAL], [0.0] * 6]


@pytest.mark.parametrize("splits", [None, True])
def test_alltoall(splits: bool | None) -> None:
    """The gradient of every row goes back to the rank that sent the row."""

    def loss(rank: int, x: torch.Tensor) -> Any:
        if splits is None:
            rows = ddl.alltoall(x)
        else:
            rows, _ = ddl.alltoall(x, [1, 2, 3], name="a")
        return (rows * 10**rank).sum()

    expected = [1.0, 1.0, 10.0, 10.0, 100.0, 100.0] if splits is None else [1.0, 10.0, 10.0, 100.0, 100.0, 100.0]
    assert gradients(loss) == [expected] * SIZE


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 1.0), ({"op": ddl.Sum}, SIZE), ({"prescale_factor": 2.0, "postscale_factor": 5.0}, 10.0)],
    ids=["average", "sum", "scaled"],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_reducescatter(grouped: bool, options: dict[str, Any], factor: float) -> None:
    """The gradients of all ranks are concatenated; five rows on three ranks are divided into 2, 2 and 1."""

    def loss(rank: int, x: torch.Tensor) -> Any:
        if grouped:
            mine, other = ddl.grouped_reducescatter([x[:5], x[:3]], **options)
            return (mine * 10**rank).sum() + 0 * other.sum()
        return (ddl.reducescatter(x[:5], **options) * 10**rank).sum()

    assert gradients(loss) == [[factor * value for value in (1, 1, 10, 10, 100)] + [0.0]] * SIZE


@pytest.mark.parametrize("op", [ddl.Min, ddl.Max, ddl.Product])
@pytest.mark.parametrize("verb", ["allreduce", "grouped_allreduce", "reducescatter"])
def test_operations_without_a_gradient(verb: str, op: int) -> None:
    """Results of Min, Max and Product may be used; asking for their gradient raises an error that says what to do."""

    def play(rank: int, job: Any) -> None:
        x = torch.ones(6, requires_grad=True)
        out = getattr(ddl, verb)([x] if "grouped" in verb else x, op=op)
        total = (out[0] if "grouped" in verb else out).sum()
        assert total.item() in (2.0, 6.0, 3.0)
        with pytest.raises(NotImplementedError, match="has no gradient; detach"):
            total.backward()

    run_world(2, play)


def test_in_a_process_set() -> None:
    """Only ranks 0 and 2 take part, in backward too, and offsets count the members of the set."""

    def loss(rank: int, x: torch.Tensor) -> Any:
        pair = ddl.add_process_set([0, 2])
        if rank == 1:
            return x.sum()
        gathered = ddl.allgather(x[:2], process_set=pair)
        scattered = ddl.reducescatter(x[:4], op=ddl.Sum, process_set=pair)
        return (gathered * weights(rank, 4)).sum() + 1000 * scattered.sum()

    gathered = [101 / 2 * row for row in (1, 2, 3, 4)]
    assert gradients(loss) == [
        [gathered[0] + 2000, gathered[1] + 2000, 2000, 2000, 0, 0],
        [1.0] * 6,
        [gathered[2] + 2000, gathered[3] + 2000, 2000, 2000, 0, 0],
    ]


def test_second_derivative() -> None:
    """Backward is itself differentiable."""

    def play(rank: int, job: Any) -> list[float]:
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        y = ddl.allreduce(x, op=ddl.Sum) ** 3
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second.tolist()

    # y = (x0 + x1)^3 on both ranks: d/dx0 of (y of rank 0 + y of rank 1) is 6 s^2, and its derivative, over both, 24 s.
    assert run_world(2, play) == [[24 * 4.0, 24 * 6.0]] * 2


def test_without_gradients_nothing_is_recorded() -> None:
    """Tensors that require no gradient, and calls under no_grad, are not recorded."""

    def play(rank: int, job: Any) -> None:
        assert ddl.allreduce(torch.ones(2)).grad_fn is None
        with torch.no_grad():
            assert ddl.allreduce(torch.ones(2, requires_grad=True)).grad_fn is None
        assert ddl.allreduce(torch.ones(2, requires_grad=True)).grad_fn is not None

    run_world(1, play)
