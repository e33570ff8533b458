"""Learns handwritten digits with DeepSpeed's ZeRO stage 2, which takes the process group that it finds."""

import deepspeed
import torch
import torch.distributed as dist
from learning import network, options, shards, tell
from torch import nn


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 1 or 2")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    size = dist.get_world_size()
    torch.manual_seed(1)
    config = {
        "train_batch_size": args.batch,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
    }
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loader = shards(args, dist.get_rank(), size)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    tell(engine.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
