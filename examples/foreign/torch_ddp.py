"""A script for torch's own DistributedDataParallel: `ddl run` sets the environment variables that torch reads."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")  # by env://: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = torch.randn(16, 1)  # the weights to learn; the seed makes them equal on every rank
    own = torch.Generator().manual_seed(rank)
    for step in range(100):
        inputs = torch.randn(32, 16, generator=own)
        loss = nn.functional.mse_loss(model(inputs), inputs @ weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    seen = hashlib.sha256()
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    print(f"rank {rank} of {size}: parameters {seen.hexdigest()[:12]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
