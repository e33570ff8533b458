"""Metrics of torchmetrics are gathered by ddl, whatever each rank has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import run_world

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed (the extra `test` has it)")

SIZE = 3
ROWS = {"even": (4, 4, 4), "uneven": (5, 1, 3), "one rank has none": (4, 0, 3)}


def on_each(function: Callable[[int], Any]) -> list[Any]:
    return run_world(SIZE, lambda rank, job: function(rank))


def synced(kind: Any, **arguments: Any) -> Any:
    """The line that the documents show."""
    return kind(dist_sync_fn=ddl.gather_all_tensors, distributed_available_fn=ddl.is_initialized, **arguments)


def rows_of(rank: int, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    scores, labels = torch.rand(sum(counts), 4, generator=random), torch.randint(0, 4, (sum(counts),), generator=random)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return scores[own].softmax(1), labels[own]


@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", ["MeanMetric", "MulticlassAccuracy", "MulticlassAUROC", "CatMetric"])
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_the_value_is_that_of_all_rows(name: str, counts: tuple[int, ...]) -> None:
    """Sums are added, and lists are concatenated, with as many rows as each rank has."""
    classes = {} if name in ("MeanMetric", "CatMetric") else {"num_classes": 4}
    kind = getattr(torchmetrics, name, None) or getattr(torchmetrics.classification, name)

    def value(metric: Any, scores: torch.Tensor, labels: torch.Tensor) -> Any:
        if len(labels):
            metric.update(*((scores, labels) if classes else (scores,)))
        return metric.compute()

    every = [rows_of(rank, counts) for rank in range(SIZE)]
    expected = value(kind(**classes), *map(torch.cat, zip(*every)))
    for found in on_each(lambda rank: value(synced(kind, **classes), *rows_of(rank, counts))):
        torch.testing.assert_close(found, expected)


def test_shapes_may_differ_in_every_dimension() -> None:
    """Each rank gets every rank's tensor as it was, and its own is the same object."""
    shapes = [(2, 3), (4, 1), (0, 5)]

    def gathered(rank: int) -> list[torch.Tensor]:
        mine = torch.full(shapes[rank], rank, dtype=torch.int16)
        found = ddl.gather_all_tensors(mine)
        assert found[rank] is mine
        return found

    for tensors in on_each(gathered):
        assert [tuple(tensor.shape) for tensor in tensors] == shapes
        assert all(bool((tensor == i).all()) and tensor.dtype is torch.int16 for i, tensor in enumerate(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_numbers_of_every_type(dtype: torch.dtype) -> None:
    """Tensors without dimensions, as counters are; bytes of one type need not be aligned for another."""
    for tensors in on_each(lambda rank: ddl.gather_all_tensors(torch.tensor(rank).to(dtype))):
        assert [tensor.item() for tensor in tensors] == [torch.tensor(rank).to(dtype).item() for rank in range(SIZE)]


def test_a_rank_without_data_changes_no_type() -> None:
    """torchmetrics gives such a rank an empty tensor of float32; labels of the others stay integers."""

    def together(rank: int) -> torch.Tensor:
        mine = torch.tensor([]) if rank == 1 else torch.full((rank + 1, 2), 2**53 + 1)
        return torch.cat(ddl.gather_all_tensors(mine))

    for whole in on_each(together):
        assert whole.dtype is torch.int64 and whole.tolist() == [[2**53 + 1] * 2] * 4


def test_gradients_flow_through_ones_own() -> None:
    """As with torchmetrics' own function."""

    def gradient(rank: int) -> list[float]:
        mine = torch.ones(2, requires_grad=True)
        torch.cat(ddl.gather_all_tensors(mine * (rank + 1))).sum().backward()
        assert mine.grad is not None
        return mine.grad.tolist()

    assert on_each(gradient) == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_process_set_is_a_group() -> None:
    """``process_group`` takes one; anything else is refused at the call."""

    def within(rank: int) -> Any:
        pair = ddl.add_process_set([0, 2])
        with pytest.raises(ValueError, match=r"is of type str; pass a ddl\.ProcessSet"):
            ddl.gather_all_tensors(torch.ones(1), "world")  # type: ignore[arg-type]
        if rank == 1:
            return None
        metric = synced(torchmetrics.SumMetric, process_group=pair)
        metric.update(float(rank + 1))
        return metric.compute().item()

    assert on_each(within) == [4.0, None, 4.0]
