"""Learns handwritten digits with Accelerate, which takes the process group that it finds."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from learning import digits, network, options, tell
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    learn, _, _ = digits()
    loader = DataLoader(learn, args.batch // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    tell(model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
