"""Small models from a list of block kinds, each with a gradient of another shape of trouble; knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS", "SPARSE", "VOCABULARY", "WIDTH", "BlockSpec", "Model", "Raised", "build"]

WIDTH = 4
VOCABULARY = 6
SPARSE = "sparse table"


class Raised(Exception):
    """What a program raises on purpose, in forward or in backward."""


class Boom(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise Raised("in backward")


# --- blocks: (x: (batch, WIDTH), ids: (batch, 2)) → (batch, WIDTH)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Convolved(nn.Module):
    """The gradient of the bias is a view of the output's where that is 1×1 and the batch is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x.view(-1, WIDTH, 1, 1))
        return x + out.view(-1, WIDTH)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Table(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.inner = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(ids[:, 0])
        return x + out


class SparseTable(Table):
    def __init__(self) -> None:
        super().__init__(sparse=True)


class Positioned(nn.Module):
    """At batch 1 the gradient of the positions is a view of what the table's backward still reads."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(2, WIDTH))
        self.inner = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(ids) + self.positions.unsqueeze(0)  # (batch, 2, WIDTH)
        return x + out[:, 0] * torch.tanh(out[:, 1])


class Views(nn.Module):
    """Two parameters whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(2, 2))
        self.b = nn.Parameter(torch.empty(WIDTH, 1))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.a.view(-1) + self.b.view(-1))


class Broadcast(nn.Module):
    """Gradients that at batch 1 are all the tensor that backward goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(1, WIDTH))
        self.b = nn.Parameter(torch.empty(WIDTH))
        self.c = nn.Parameter(torch.empty(1, WIDTH))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (x + self.a) + self.b + self.c


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.tanh(functional.linear(x, self.weight)), self.weight.t())


class Gain(nn.Module):
    """Parameters without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))
        self.offset = nn.Parameter(torch.empty(()))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + self.gain) + self.offset


class Summed(nn.Module):
    """The gradient of ``a`` is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(3, 2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + self.a.sum()


class Turned(nn.Module):
    """A weight whose memory is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).t())

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


class Flipped(nn.Module):
    """Gradients through a permutation and through complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 1, 1).permute(2, 0, 1))
        self.pair = nn.Parameter(torch.empty(2, 2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        product = torch.view_as_real(torch.view_as_complex(x.view(-1, 2, 2)) * torch.view_as_complex(self.pair))
        return x + 0.5 * product.reshape(-1, WIDTH) + self.weight.flatten()


class Unused(nn.Module):
    """Parameters that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x


KINDS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense,
    "convolved": Convolved,
    "normed": Normed,
    "table": Table,
    "positioned": Positioned,
    "views": Views,
    "broadcast": Broadcast,
    "tied": Tied,
    "gain": Gain,
    "summed": Summed,
    "turned": Turned,
    "flipped": Flipped,
    "unused": Unused,
    SPARSE: SparseTable,
}


# --- models


@dataclass(frozen=True)
class BlockSpec:
    """One block of a part."""

    kind: str
    checkpoint: str = ""  # or "reentrant", or "not reentrant"
    same_as: int = -1  # the block whose parameters it has
    frozen: bool = False  # in the beginning
    gated: bool = False  # ranks may leave it out


class Model(nn.Module):
    """Blocks one after the other; the first is always dense and always used, so that every loss has a gradient."""

    def __init__(self, specs: Sequence[BlockSpec]) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.blocks = nn.ModuleList()
        for spec in specs:
            self.blocks.append(KINDS[spec.kind]() if spec.same_as < 0 else self.blocks[spec.same_as])

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, left_out: Collection[int] = (), boom: int = -1, fails: int = -1
    ) -> torch.Tensor:
        """``left_out``: blocks that are passed by. ``boom``: the block whose output's backward raises; ``fails``: that raises."""
        for i, (spec, block) in enumerate(zip(self.specs, self.blocks)):
            if i == fails:
                raise Raised("in forward")
            if i not in left_out:
                if spec.checkpoint and torch.is_grad_enabled():  # else there is nothing to save
                    x = checkpoint(block, x, ids, use_reentrant=spec.checkpoint == "reentrant")
                else:
                    x = block(x, ids)
            if i == boom:
                x = Boom.apply(x)  # type: ignore[no-untyped-call]  # torch's
        return x


def build(specs: Sequence[BlockSpec], seed: int) -> Model:
    """The model in float64, with values that follow from ``seed``; torch's own generator is shared by all threads."""
    model = Model(specs).double()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) / 2)
    for spec, block in zip(specs, model.blocks):
        if spec.frozen:
            block.requires_grad_(False)
    return model
