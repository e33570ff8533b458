"""Uses ddl_torch and torch.distributed in one program: they share one world. The argument says which one comes first."""

import sys

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20  # enough for replay


def main() -> None:
    first = sys.argv[1]
    if first == "ddl":
        ddl.init()
    dist.init_process_group("ddl")
    ddl.init()
    rank, size = ddl.rank(), ddl.size()
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    messages = 0
    for step in range(2 * STEPS):
        if step == STEPS:
            messages = ddl.stats()["control_messages"]
        one, other = torch.full((3,), float(rank)), torch.full((3,), float(rank))
        ddl.allreduce_(one, op=ddl.Sum)
        dist.all_reduce(other)
        assert torch.equal(one, other)
    assert ddl.stats()["control_messages"] == messages

    model = DistributedDataParallel(nn.Linear(4, 1))
    try:
        ddl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(torch.ones(2, 4)).sum().backward()
    except ddl.ReducedTwice as error:
        print(f"refused: {error}"[:60], flush=True)
    del model
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: ddl goes on: {ddl.is_initialized()}", flush=True)


if __name__ == "__main__":
    main()
