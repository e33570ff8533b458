"""Learns handwritten digits with torch.compile around DistributedDataParallel, and averages the loss inside a graph."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from learning import network, options, shards, tell, train
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--compiler", default="aot_eager", help="backend of torch.compile; inductor needs a C++ compiler"
    )
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    torch.manual_seed(1)
    module = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(module.parameters(), lr=args.lr)
    model = torch.compile(module, backend=args.compiler)
    train(model, optimizer, shards(args, dist.get_rank(), dist.get_world_size()), args)

    @torch.compile(backend=args.compiler, fullgraph=True)
    def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = functional.all_reduce(value.square(), "avg", dist.group.WORLD)
        return mean

    mean = mean_over_ranks(torch.tensor([float(dist.get_rank())])).item()
    assert mean == sum(rank**2 for rank in range(dist.get_world_size())) / dist.get_world_size()
    tell(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
