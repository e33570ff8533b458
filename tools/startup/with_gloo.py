"""One allreduce with torch's Gloo; tools/bench_startup.py times the whole script."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4)
dist.all_reduce(total)
assert total.tolist() == [dist.get_world_size()] * 4
dist.destroy_process_group()
