"""Learns handwritten digits with torch's fully_shard (FSDP2): each rank keeps a part of every parameter."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from plain.torch_digits import digits, network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="ddl", help="of torch.distributed")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    learn, test_images, test_labels = digits()
    model = network()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * size)

    sampler: DistributedSampler[int] = DistributedSampler(learn)
    loader = DataLoader(learn, args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    seen, local = hashlib.sha256(), 0
    for parameter in model.parameters():
        seen.update(parameter.full_tensor().detach().numpy().tobytes())
        local += parameter.to_local().numel()
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {rank} of {size}: parameters {seen.hexdigest()[:12]}, {local} elements here", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
