"""Trains twenty steps in float64 with equal global batches, by ddl or by torch's DDP, and saves the parameters."""

from __future__ import annotations

import sys

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn

ROWS = 16  # of a global batch; each of four ranks has four


def train(way: str, rank: int, size: int) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward: nn.Module = model
    if way == "ddl":
        optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        ddl.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        forward = nn.parallel.DistributedDataParallel(model)
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    for step in range(20):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 10, generator=random, dtype=torch.float64)[own]
        y = torch.randn(ROWS, 2, generator=random, dtype=torch.float64)[own]
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x), y).backward()
        optimizer.step()
    return model


def main(path: str) -> None:
    ddl.init()
    rank, size = ddl.rank(), ddl.size()
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    for way in ("ddl", "ddp"):
        model = train(way, rank, size)
        torch.save([parameter.detach() for parameter in model.parameters()], f"{path}.{way}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
