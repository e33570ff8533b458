"""Learns handwritten digits with layers that are divided among pairs of ranks; pairs train on different images."""

import torch
import torch.distributed as dist
from learning import options, shards, tell, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    pairs = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train(model, optimizer, shards(args, mesh.get_local_rank("data"), pairs), args)
    tell(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
