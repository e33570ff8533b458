"""Trainings of the tests of elastic jobs that use more of PyTorch: each can be computed by one process, too."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

SAMPLES, GLOBAL_BATCH = 48, 12
STEPS = 60  # 15 epochs
INFINITE = 10  # the step whose loss is infinite, with a GradScaler

USES = ("workers", "persistent", "compile", "autocast", "scaler", "sparse")


class Words(nn.Module):
    """A table of words with sparse gradients; ``uses`` counts how often each sample was used.

    The gradient of ``uses`` is the number of uses in the step, and its learning rate is 1: so the table is the log of all
    ranks together, and contains a step if and only if the weights contain it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 6, sparse=True)
        self.uses = nn.Embedding(SAMPLES, 1, sparse=True)
        nn.init.zeros_(self.uses.weight)
        self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        words = torch.stack([samples % 31, samples * 7 % 31, samples % 5], 1)
        return self.head(self.words(words).sum(1))  # type: ignore[no-any-return]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The samples are their own numbers; a model makes its inputs of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def model_of(use: str) -> Any:
    torch.manual_seed(3)
    return Words().to(torch.float32 if use in ("autocast", "scaler") else torch.float64)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [*model.words.parameters(), *model.head.parameters()]},
        {"params": [model.uses.weight], "lr": 1.0},
    ]
    return torch.optim.SGD(groups, lr=0.05)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that lowers the first group's learning rate, and leaves that of the counts."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.98**step, lambda step: 1.0])


def scaler_of(use: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7, enabled=use == "scaler")


def compiled(use: str, model: Any) -> Any:
    """Return what computes the forward pass: the model, compiled for the use "compile"."""
    return torch.compile(model, backend="aot_eager", dynamic=False) if use == "compile" else model


def loss_of(use: str, model: Any, call: Any, samples: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return the loss of ``samples``, whose gradient averaged over ``size`` ranks is that of the global batch."""
    lower = torch.autocast("cpu", torch.bfloat16) if use in ("autocast", "scaler") else nullcontext()
    with lower:
        predicted = call(samples)
    wanted = torch.sin(samples.to(predicted.dtype)).unsqueeze(1)
    loss = (predicted - wanted).square().sum() * (size / GLOBAL_BATCH)
    if use == "scaler" and step == INFINITE:
        loss = loss * float("inf")
    used: torch.Tensor = model.uses(samples).sum() * size
    total: torch.Tensor = loss - used
    return total


def apply(
    use: str, loss: torch.Tensor, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: torch.amp.GradScaler
) -> None:
    """Compute the gradients, and apply them."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


def undisturbed(use: str, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters after one process alone has trained on ``batches``, without ddl."""
    model = model_of(use)
    optimizer = optimizer_of(model)
    scheduler, scaler = scheduler_of(optimizer), scaler_of(use)
    for step, samples in enumerate(batches):
        apply(use, loss_of(use, model, model, samples, 1, step), optimizer, scheduler, scaler)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
