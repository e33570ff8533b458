"""Tests collectives that write in place: autograd notices the write, and no machine code writes to freed memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import ddl_torch as ddl
import pytest
import torch

from ddlcore.testing import run_world

pytestmark = pytest.mark.timeout(60)
COUNT = 1000

IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce_": lambda y: ddl.allreduce_(y),
    "allreduce_ by name": lambda y: ddl.allreduce_(y, name="n"),
    "allreduce_async_": lambda y: ddl.synchronize(ddl.allreduce_async_(y)),
    "grouped_allreduce_": lambda y: ddl.grouped_allreduce_([y, torch.ones(2)]),
    "grouped_allreduce_async_": lambda y: ddl.synchronize(ddl.grouped_allreduce_async_([torch.ones(2), y])),
    "broadcast_": lambda y: ddl.broadcast_(y, 0),
    "broadcast_async_": lambda y: ddl.synchronize(ddl.broadcast_async_(y, 0)),
    "broadcast_parameters": lambda y: ddl.broadcast_parameters({"y": y}, 0),
}
ASYNCHRONOUS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce_async_": lambda y: ddl.allreduce_async_(y, op=ddl.Sum, name="t"),
    "grouped_allreduce_async_": lambda y: ddl.grouped_allreduce_async_([y], op=ddl.Sum, name="t"),
    "broadcast_async_": lambda y: ddl.broadcast_async_(y, 0, name="t"),
}


@pytest.mark.parametrize("verb", IN_PLACE)
def test_autograd_notices(verb: str) -> None:
    """If a tensor that autograd saved is overwritten, torch raises instead of giving a wrong gradient."""

    def play(rank: int, job: Any) -> None:
        y = torch.ones(3, requires_grad=True).exp()
        IN_PLACE[verb](y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_world(2, play)


@pytest.mark.parametrize("verb", ASYNCHRONOUS)
def test_autograd_notices_what_it_saved_meanwhile(verb: str) -> None:
    """Autograd also notices for tensors that it saved between the call and its wait."""

    def play(rank: int, job: Any) -> None:
        y, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        handle = ASYNCHRONOUS[verb](y)
        product = y * weight
        ddl.synchronize(handle)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    run_world(2, play)


@pytest.mark.parametrize("how", ["set_", "data"])
@pytest.mark.parametrize("verb", ASYNCHRONOUS)
def test_a_tensor_that_gets_other_memory_in_flight(verb: str, how: str) -> None:
    """The tensor's first memory lives until the operation has ended, and the operation writes only there."""

    def play(rank: int, job: Any) -> None:
        if rank == 1:
            ddl.barrier()  # so that the operation of rank 0 is in flight for a long time
            ddl.synchronize(ASYNCHRONOUS[verb](torch.ones(COUNT)))
            return
        y = torch.ones(COUNT)
        before = y.untyped_storage()._cdata
        handle = ASYNCHRONOUS[verb](y)
        if how == "set_":
            y.set_(torch.zeros(COUNT))  # type: ignore[call-overload]  # torch accepts a tensor too
        else:
            y.data = torch.zeros(COUNT)
        gc.collect()
        others = [torch.full((COUNT,), -7.0) for _ in range(50)]  # one of them would get freed memory
        assert all(other.untyped_storage()._cdata != before for other in others)
        ddl.barrier()
        ddl.synchronize(handle)
        assert all((other == -7.0).all() for other in others)
        assert (y == 0).all()

    run_world(2, play)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("verb", ASYNCHRONOUS)
def test_a_tensor_is_not_resized_in_flight(verb: str, dtype: torch.dtype) -> None:
    """torch refuses to resize the tensor or any view of it, whatever the type, and the sum is right."""

    def play(rank: int, job: Any) -> None:
        y = torch.ones(COUNT, dtype=dtype)
        if rank == 0:
            handle = ASYNCHRONOUS[verb](y)
            for view in (y.detach(), y[:10]):  # torch changes the shape of what it refuses to resize
                with pytest.raises(RuntimeError, match="not resizable"):
                    view.resize_(100 * COUNT)
            with pytest.raises(RuntimeError, match="not resizable"):
                y.untyped_storage().resize_(0)
        ddl.barrier()
        if rank == 1:
            handle = ASYNCHRONOUS[verb](y)
        ddl.synchronize(handle)
        assert (y == (2 if "allreduce" in verb and dtype is not torch.bool else 1)).all()

    run_world(2, play)


def test_verbs_that_wait_leave_a_tensor_resizable() -> None:
    """Only asynchronous operations make a tensor impossible to resize."""

    def play(rank: int, job: Any) -> None:
        y = torch.ones(4)
        ddl.allreduce_(y)
        ddl.allreduce_(y, name="n")
        ddl.grouped_allreduce_([y])
        ddl.broadcast_(y, 0)
        ddl.broadcast_parameters({"y": y}, 0)
        ddl.synchronize(ddl.allreduce_async(y))
        assert y.resize_(4000).shape == (4000,)

    run_world(2, play)
