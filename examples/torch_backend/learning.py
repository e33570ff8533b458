"""What the programs in this folder share: the options, the loop, and the lines at the end. None of it depends on ddl."""

import argparse
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append(str(Path(__file__).parents[1]))
from plain.torch_digits import digits, network  # the same data and network as in one process

__all__ = ["digits", "network", "options", "shards", "tell", "train"]


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", default="ddl", help="of torch.distributed")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="images a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate")
    return parser


def shards(args: argparse.Namespace, part: int, parts: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return the batches of one of the ``parts`` in which the ranks divide the images."""
    learn, _, _ = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(learn, parts, part, drop_last=True)
    return DataLoader(learn, args.batch // parts, sampler=sampler)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, args: argparse.Namespace) -> None:  # type: ignore[type-arg]
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)


def tell(model: nn.Module, parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Print the accuracy on images that the model has not seen, and a digest of all parameters."""
    _, images, labels = digits()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    seen, here = hashlib.sha256(), 0
    for parameter in model.parameters() if parameters is None else parameters:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        seen.update(whole.detach().clone().numpy().tobytes())  # a clone: FSDP1 has to resize its own memory later
        here += local.numel()
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} %")
    print(f"rank {rank} of {size}: parameters {seen.hexdigest()[:12]}, {here} elements here", flush=True)
