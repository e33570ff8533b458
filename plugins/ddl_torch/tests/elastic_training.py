"""The model and the data of the tests of elastic training: each step's batch is the same on all ranks."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 150


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return images, images.sum(1, keepdim=True)


def undisturbed(steps: int = STEPS, seed: int = 1) -> list[torch.Tensor]:
    """Return the model's state after one process alone has trained."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)
    for step in range(steps):
        images, target = batch(step)
        optimizer.zero_grad()
        (model(images) - target).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [value.detach().clone() for value in model.state_dict().values()]
