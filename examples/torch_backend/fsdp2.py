"""Learns handwritten digits with torch's fully_shard (FSDP2): each rank keeps a part of every parameter.

With --replicas N, the ranks form N groups. Each group has all parameters, divided among its ranks (HSDP).
With --checkpoint DIRECTORY, all ranks save their parts at the end, and a later run with any number of ranks goes on.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from learning import network, options, shards, tell, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks that have all parameters")
    parser.add_argument("--checkpoint", type=Path, help="where to save the parameters, and to find saved ones")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    size = dist.get_world_size()
    torch.manual_seed(1)
    model = network()
    mesh = init_device_mesh("cpu", (args.replicas, size // args.replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if args.replicas > 1 else mesh["shard"]
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    if args.checkpoint and args.checkpoint.exists():
        parameters, moments = get_state_dict(model, optimizer)
        checkpoint.load({"model": parameters, "optimizer": moments}, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    train(model, optimizer, shards(args, dist.get_rank(), size), args)
    if args.checkpoint:
        parameters, moments = get_state_dict(model, optimizer)
        checkpoint.save({"model": parameters, "optimizer": moments}, checkpoint_id=args.checkpoint)
    tell(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
