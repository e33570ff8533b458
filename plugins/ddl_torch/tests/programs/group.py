"""Uses torch.distributed on the backend ddl, in the way that its arguments say. It imports nothing of ddl."""

import argparse
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def begin(backend: str, method: str, rank: int, size: int, timeout_s: float) -> None:
    """Initialize torch.distributed by ``method``: env, tcp://…, file://… or store:FILE."""
    patience = timedelta(seconds=timeout_s)
    kind, _, where = method.partition(":")
    if kind == "env":
        dist.init_process_group(backend, timeout=patience)
    elif kind == "store":
        dist.init_process_group(
            backend, store=dist.FileStore(where, size), rank=rank, world_size=size, timeout=patience
        )
    else:
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=patience)


def collectives() -> str:
    """Make some calls, and return what came of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    told: list[object] = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": other} for other in range(size)]
    pair = dist.new_group([0, size - 1], backend="ddl")
    if rank in (0, size - 1):
        mine = torch.tensor([rank])
        dist.broadcast(mine, size - 1, group=pair)
        assert mine.item() == size - 1
    if rank == 0:
        dist.send(torch.tensor([7]), size - 1)
    elif rank == size - 1:
        got = torch.tensor([0])
        dist.recv(got, 0)
        assert got.item() == 7
    listed = [torch.tensor([rank, to]) for to in range(size)]
    parts = [torch.zeros(2, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(parts, listed)
    assert [part.tolist() for part in parts] == [[other, rank] for other in range(size)]
    dist.barrier()
    return f"rank {rank} of {size} on {dist.get_backend()}"


def train(ends: str) -> None:
    """Train by DistributedDataParallel until ``ends`` happens to rank 1: it is killed, makes another call, or sleeps."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(100, 100))
    for step in range(10_000):
        if step == 30 and rank == 1:
            print(f"at {time.time():.3f} {ends}", flush=True)
            if ends == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if ends == "sleeps":
                time.sleep(300)
            dist.all_reduce(torch.zeros(3))
        model(torch.ones(4, 100)).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="env", nargs="+", help="one for each time that the group is made")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--size", type=int, default=-1)
    parser.add_argument("--backend", default="ddl", help="of the default group")
    parser.add_argument("--ends", help="train until then")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="timeout of the group")
    args = parser.parse_args()
    for method in args.method if isinstance(args.method, list) else [args.method]:
        begin(args.backend, method, args.rank, args.size, args.timeout_s)
        print(collectives(), flush=True)
        if args.ends:
            try:
                train(args.ends)
            except RuntimeError as error:
                print(f"at {time.time():.3f} {type(error).__name__}: {error}", flush=True)
                sys.exit(3)
        dist.destroy_process_group()
    print(f"ddl is imported: {'ddl_torch' in sys.modules}", flush=True)


if __name__ == "__main__":
    main()
