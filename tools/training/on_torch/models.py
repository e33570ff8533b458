"""The models of the training benchmark, with synthetic batches; knows nothing of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

__all__ = ["WORKLOADS", "Batch", "Workload"]

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, classes
CLASSES = 10
VOCABULARY = 8192
SEQUENCE = 128
WIDTH = 256  # of the gpt
HEADS = 4
BLOCKS = 6
ROWS = 1_000_000  # of the embedding


@dataclass(frozen=True)
class Workload:
    """A model and the input of one rank's step. ``samples`` is a rank's batch size.

    ``momentum`` of SGD is 0 for sparse gradients, with which torch's optimizer has none.
    """

    name: str
    samples: int
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    momentum: float = 0.9


def _wide() -> nn.Module:
    sizes = (3072, 4096, 4096, 1024, CLASSES)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _deep() -> nn.Module:
    """Return 200 layers and a head, with Kaiming initialization.

    With torch's own, gradients would become denormal numbers, which are slow.
    """
    layers: list[nn.Module] = []
    for _ in range(200):
        layer = nn.Linear(64, 64)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


class _Attention(nn.Module):
    """A transformer block with layer normalization before each half (GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.forth = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.mixed(self.before(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (rows, heads, length, width / heads)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(rows, length, width))
        return x + torch.as_tensor(self.back(functional.gelu(self.forth(self.between(x)))))


class _Gpt(nn.Module):
    """A small GPT whose head shares the embedding's weights, so that their gradient is complete last (GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(SEQUENCE, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.Sequential(*(_Attention() for _ in range(BLOCKS)))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits = functional.linear(self.last(self.blocks(x)), self.tokens.weight)
        return logits.view(-1, VOCABULARY)  # (rows * length, vocabulary)


class _Residual(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.way(x) + self.around(x))


def _resnet() -> nn.Module:
    """Return ResNet-34's blocks (3, 4, 6, 3) with width 32, and a first layer for small images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    inputs = 32
    for stage, blocks in enumerate((3, 4, 6, 3)):
        outputs = 32 << stage
        for block in range(blocks):
            layers.append(_Residual(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def _embedding() -> nn.Module:
    """Return a table of a million rows with sparse gradients, and a head."""
    return nn.Sequential(nn.Embedding(ROWS, 64, sparse=True), nn.Linear(64, CLASSES))


def _vectors(*shape: int) -> Callable[[int, torch.Generator], Batch]:
    def batch(samples: int, own: torch.Generator) -> Batch:
        return torch.randn(samples, *shape, generator=own), torch.randint(CLASSES, (samples,), generator=own)

    return batch


def _rows(samples: int, own: torch.Generator) -> Batch:
    return torch.randint(ROWS, (samples,), generator=own), torch.randint(CLASSES, (samples,), generator=own)


def _tokens(samples: int, own: torch.Generator) -> Batch:
    text = torch.randint(VOCABULARY, (samples, SEQUENCE + 1), generator=own)
    return text[:, :-1].contiguous(), text[:, 1:].reshape(-1)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("wide", 8, _wide, _vectors(3072)),
        Workload("deep", 8, _deep, _vectors(64)),
        Workload("gpt", 2, _Gpt, _tokens),
        Workload("resnet", 16, _resnet, _vectors(3, 32, 32)),
        Workload("embedding", 4096, _embedding, _rows, momentum=0.0),
    )
}
