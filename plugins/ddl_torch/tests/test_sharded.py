"""A tensor of which each rank has another part, or that has no memory of its own, is refused by name.

Where a program uses ddl beside FSDP, such parameters are left alone.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ddl_torch as ddl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddlcore import api
from ddlcore.testing import run_world

KINDS = ["FSDP1", "FSDP1 with the original parameters", "FSDP2"]


@contextmanager
def _sharded(kind: str) -> Iterator[nn.Module]:
    """A layer of which this rank, one of two, has a part. The other rank does not exist: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: nn.Module = nn.Linear(4, 4)
        if kind == "FSDP2":
            fully_shard(model)
        else:
            original = kind != "FSDP1"
            model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        yield model
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    with _sharded(request.param) as model:
        yield model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _group_added(model: nn.Module) -> None:
    whole = nn.Parameter(torch.zeros(2))
    optimizer = ddl.DistributedOptimizer(torch.optim.SGD([whole], lr=0.1))
    optimizer.add_param_group({"params": list(model.parameters())})


VERBS: dict[str, tuple[Callable[[nn.Module], object], str]] = {  # how the message calls the tensor, "": by its name
    "verify": (ddl.verify, ""),
    "verify an optimizer": (lambda model: ddl.verify(_optimizer(model)), "group 0, parameter 0"),
    "broadcast_parameters": (lambda model: ddl.broadcast_parameters(model.named_parameters(), 0), ""),
    "broadcast_optimizer_state": (lambda model: ddl.broadcast_optimizer_state(_optimizer(model), 0), "parameter 0"),
    "DistributedOptimizer": (lambda model: ddl.DistributedOptimizer(_optimizer(model), model.named_parameters()), ""),
    "add_param_group": (_group_added, "1.0"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_sharded_parameters_are_refused_on_every_rank(model: nn.Module, verb: str) -> None:
    """Their values were compared, broadcast or added, although each rank has the values of other elements."""
    known = next(name for name, _ in model.named_parameters())
    call, name = VERBS[verb]

    def play(rank: int, job: api.Job) -> None:
        with pytest.raises(ValueError, match=rf"{name or known}.*: a part of a tensor \(FSDP\) or a wrapper"):
            call(model)

    run_world(2, play)


def test_a_bare_optimizer_of_sharded_parameters_is_not_compared(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step of any optimizer compares its parameters. A DTensor has address 0, which must not be read."""

    def play(rank: int, job: api.Job) -> None:
        optimizer = _optimizer(model)
        for param in model.parameters():
            param.grad = torch.full_like(param, float(rank))
        optimizer.step()

    with caplog.at_level(logging.WARNING, "ddl"):
        run_world(2, play)
    assert "parameters differ" not in caplog.text


VALUES: dict[str, Callable[[torch.Tensor], object]] = {
    "allreduce": ddl.allreduce,
    "allreduce_": ddl.allreduce_,
    "grouped_allreduce": lambda value: ddl.grouped_allreduce([value]),
    "allgather": ddl.allgather,
    "alltoall": ddl.alltoall,
    "broadcast": lambda value: ddl.broadcast(value, 0),
    "broadcast_": lambda value: ddl.broadcast_(value, 0),
    "reducescatter": ddl.reducescatter,
}


@pytest.mark.parametrize("verb", VALUES)
def test_a_tensor_without_memory_of_its_own_is_refused_by_every_verb(verb: str) -> None:
    """This ended the process with SIGSEGV. Also in the place of a tensor that the same call has sent before."""
    with _sharded("FSDP2") as layer:
        wrapper = layer.get_parameter("weight").detach()
    freed = torch.zeros(4, 4)
    freed.untyped_storage().resize_(0)

    def play(rank: int, job: api.Job) -> None:
        for _ in range(4):
            VALUES[verb](torch.zeros(wrapper.shape))
        for value in (wrapper, freed):
            with pytest.raises(ValueError, match=r"of shape \(4, 4\) has no memory of its own"):
                VALUES[verb](value)
        VALUES[verb](torch.zeros(wrapper.shape))

    run_world(2, play)
