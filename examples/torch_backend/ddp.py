"""Learns handwritten digits with torch's DistributedDataParallel; only the name of the backend is ddl's."""

import torch
import torch.distributed as dist
from learning import network, options, shards, tell, train
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    torch.manual_seed(1)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train(model, optimizer, shards(args, dist.get_rank(), dist.get_world_size()), args)
    tell(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
