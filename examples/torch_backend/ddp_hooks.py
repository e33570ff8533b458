"""DistributedDataParallel with PowerSGD: gradients cross as matrices of low rank. Ranks may have unequal inputs."""

import torch
import torch.distributed as dist
from learning import digits, network, options, tell
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True, static_graph=True)
    model.register_comm_hook(PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4), powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    learn, _, _ = digits()
    own = Subset(learn, range(rank, len(learn) - 100 * rank, size))  # later ranks have fewer images
    loader = DataLoader(own, args.batch // size, shuffle=True)
    for epoch in range(args.epochs):
        with Join([model]):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    tell(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
