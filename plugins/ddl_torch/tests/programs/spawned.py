"""Starts two ranks by torch.multiprocessing, with the init_method that is the argument."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing


def train(rank: int, size: int, method: str) -> None:
    dist.init_process_group("ddl", init_method=method, rank=rank, world_size=size)
    tensor = torch.full((2,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 3.0]
    print(f"rank {rank} of {size} on {dist.get_backend()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (2, sys.argv[1]), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
