"""Runs training loops written for DDP, Lightning and Transformers on forked worlds; prints how far each is from one process.

``python -m tests.semantics.loops lightning shm/00/off/replay shm+gloo/01/on/replay``
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ddl_torch as ddl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.semantics.worlds import Spec, run_function, warm_up

__all__ = ["LOOPS", "main"]

STEPS = 6
ROWS = 12  # of a global batch: 1, 2 and 4 ranks have equal parts
CLIP = 0.05  # below what the norm of the gradients is

# `ddl run` sets these for scripts written for torchrun. Transformers, Accelerate and Lightning would read from them
# that they are to form a process group, wrap the model in DDP and share the rows out among the ranks; but ddl reduces
# the gradients here, and each rank has rows of its own. So a program takes them away before it imports any of the three.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

Rows = tuple[torch.Tensor, torch.Tensor]


class Network(nn.Module):
    """A loss that is the mean over rows, as the libraries want it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) / 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.body(inputs)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def rows(step: int, rank: int, size: int) -> Rows:
    """What ``rank`` sees of the global batch of a step."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 5, generator=random, dtype=torch.float64) * 3
    y = torch.randn(ROWS, 2, generator=random, dtype=torch.float64) * 3
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return x[own], y[own]


class Batches(IterableDataset[Rows]):
    """Whole batches of one rank, in order: samplers of the libraries would shuffle."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __iter__(self) -> Iterator[Rows]:
        for step in range(STEPS):
            yield rows(step, self.rank, self.size)


def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module, size: int) -> torch.optim.Optimizer:
    return optimizer if size == 1 else ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def by_hand(rank: int, size: int) -> nn.Module:
    """Backward, unscale, clip, step: as written for DDP, with the optimizer wrapped and nothing else changed."""
    model = Network()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, size)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*rows(step, rank, size))["loss"]
        if step % 2:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return model


def in_lightning(rank: int, size: int) -> nn.Module:
    """A LightningModule with ``gradient_clip_val``."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # mypy does not read its types
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Rows, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(*batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return wrapped(optimizer, self, size)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Batches(rank, size), batch_size=None))
    network: nn.Module = module.network
    return network


def in_transformers(rank: int, size: int) -> nn.Module:
    """A Trainer with its defaults, of which one is to clip gradients to a norm of 1."""
    from transformers import Trainer, TrainingArguments

    model = Network()
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model, size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    class Single(IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for x, y in Batches(rank, size):
                yield from ({"inputs": one, "labels": other} for one, other in zip(x, y))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS // size,
            max_steps=STEPS,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        assert arguments.max_grad_norm == 1.0
        Trainer(model=model, args=arguments, train_dataset=Single(), optimizers=(optimizer, scheduler)).train()
    return model


LOOPS: dict[str, Callable[[int, int], nn.Module]] = {
    "by_hand": by_hand,
    "lightning": in_lightning,
    "transformers": in_transformers,
}


def parameters(model: nn.Module) -> list[Any]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def main(loop: str, specs: Sequence[str]) -> None:
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    warm_up()
    warnings.simplefilter("ignore")  # of Lightning: few workers, an unknown length
    begun = parameters(Network())
    alone = parameters(LOOPS[loop](0, 1))
    learned = max(float(np.abs(a - b).max()) for a, b in zip(begun, alone))

    def play(rank: int, size: int) -> list[Any]:
        ddl.init()
        for name in OF_TORCHRUN:
            os.environ.pop(name, None)
        found = parameters(LOOPS[loop](rank, size))
        ddl.shutdown()
        return found

    for text in specs:
        results = run_function(Spec.parse(text), play)
        distance = max(float(np.abs(a - b).max()) for result in results for a, b in zip(alone, result))
        alike = all((a == b).all() for result in results for a, b in zip(results[0], result))
        print(json.dumps({"spec": text, "distance": distance, "alike": bool(alike), "learned": learned}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
