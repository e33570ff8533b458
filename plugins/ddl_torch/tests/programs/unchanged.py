"""A script that was written for Gloo, or names no backend. It prints which backend it has got."""

import sys

import torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh


def main(way: str) -> None:
    if way == "mesh":
        init_device_mesh("cpu", (2,))
    elif way == "none":
        init_process_group()
    else:
        init_process_group(way)
    pair = dist.new_group([0, 1], None, "gloo")
    same = dist.new_group([0, 1])
    tensor = torch.full((2,), float(dist.get_rank()))
    for group in (None, pair, same):
        dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [4.0, 4.0], tensor
    for group in (None, pair):
        dist.monitored_barrier(group, timeout=60.0)
    print(f"rank {dist.get_rank()}: {[dist.get_backend(group) for group in (None, pair, same)]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
