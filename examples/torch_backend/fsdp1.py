"""Learns handwritten digits with torch's FullyShardedDataParallel (FSDP1)."""

import torch
import torch.distributed as dist
from learning import network, options, shards, tell, train
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    torch.manual_seed(1)
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train(model, optimizer, shards(args, dist.get_rank(), dist.get_world_size()), args)
    with FullyShardedDataParallel.summon_full_params(model):
        tell(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
