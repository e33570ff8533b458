"""Trainings by torch's own wrappers, on groups of the backends Gloo and ddl, and one by ddl's optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tools.training.contenders import Trainings
from tools.training.frameworks import FRAMEWORKS
from tools.training.meeting import Meeting
from tools.training.on_torch import BATCHES, LEARNING_RATE, TorchContender
from tools.training.on_torch.models import WORKLOADS, Workload

__all__ = ["trainings"]

ALONE = "ddp without communication"
SHARDED_FROM = 10_000  # parameters of a layer that is a unit of FSDP2; smaller ones belong to the whole model


def _sharded(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Shard ``model`` by FSDP2: each block of a transformer, else each large layer, and the rest."""
    mesh = DeviceMesh.from_group(group, "cpu")
    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    for part in getattr(model, "blocks", layers):
        if sum(parameter.numel() for parameter in part.parameters()) >= SHARDED_FROM:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def _contenders(workload: Workload, meet: Meeting, on_ddl: dist.ProcessGroup) -> dict[str, TorchContender]:
    """Return all contenders, with equal weights and the same inputs of this rank."""
    torch.manual_seed(0)
    first = workload.make()
    own = torch.Generator().manual_seed(1 + meet.rank)
    batches = [workload.batch(workload.samples, own) for _ in range(BATCHES)]
    gloo = dist.group.WORLD
    assert gloo is not None
    made = {}
    for name in FRAMEWORKS["c10d"].contenders:
        model: nn.Module = copy.deepcopy(first)
        if name in ("ddp", "ddl", ALONE):
            model = DistributedDataParallel(model, process_group=on_ddl if name == "ddl" else gloo)
            if name == ALONE:
                model.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
        elif name.startswith("fsdp2"):
            model = _sharded(model, on_ddl if name == "fsdp2 on ddl" else gloo)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=workload.momentum)
        if name == "optimizer":
            optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        made[name] = TorchContender(model, optimizer, batches, meet if name == "barrier" else None)
    return made


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _check_agreement(contenders: dict[str, TorchContender]) -> None:
    """Raise RuntimeError unless all that communicate have the same parameters after as many steps."""
    wanted = list(contenders["ddp"].model.parameters())
    for name in ("ddl", "optimizer", "fsdp2 on gloo", "fsdp2 on ddl"):
        for mine, other in zip(wanted, contenders[name].model.parameters(), strict=True):
            if not torch.allclose(mine, _whole(other), rtol=1e-3, atol=1e-5):
                raise RuntimeError(f"ddp and {name} have trained apart")


@contextlib.contextmanager
def trainings(model: str, meet: Meeting) -> Iterator[Trainings]:
    """Yield all contenders of this rank. Every rank calls this, after initializing ddl."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        on_ddl = dist.new_group(backend="ddl")
        assert isinstance(on_ddl, dist.ProcessGroup)
        workload = WORKLOADS[model]
        contenders = _contenders(workload, meet, on_ddl)
        sizes = [parameter.numel() for parameter in contenders["optimizer"].model.parameters()]
        yield Trainings(contenders, workload.samples, sizes, lambda: _check_agreement(contenders))
    finally:
        dist.destroy_process_group()
