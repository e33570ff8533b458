"""Trains with a Trainer of transformers, or with Accelerate, and a DistributedOptimizer; prints what came of it."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import ddl_torch as ddl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, ROWS = 4, 6


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.body(inputs)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def own_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the data."""
    random = torch.Generator().manual_seed(ddl.rank())
    return torch.randn(STEPS * ROWS, 3, generator=random), torch.randn(STEPS * ROWS, 1, generator=random)


def by_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    from transformers import Trainer, TrainingArguments

    rows = [{"inputs": x, "labels": y} for x, y in zip(*own_rows())]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            num_train_epochs=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, constant))
        trainer.train()
    return f"{trainer.state.global_step} steps, {arguments.world_size} process"


def by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(*own_rows()), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(model(x, y)["loss"])
        optimizer.step()
        steps += 1
    return f"{steps} steps, {accelerator.num_processes} process"


def main() -> None:
    warnings.simplefilter("ignore")
    ddl.init()
    torch.manual_seed(0)
    model = Network()
    begun = model.body.weight.detach().clone()
    optimizer = ddl.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    ddl.broadcast_parameters(model.state_dict(), root_rank=0)
    try:
        text = {"trainer": by_trainer, "accelerate": by_accelerate}[sys.argv[1]](model, optimizer)
    except ddl.ReducedTwice as error:
        print(f"ReducedTwice: {error}", flush=True)
        os._exit(0)  # torch's process group still runs
    ddl.verify(model)
    print(f"{text}, learned: {bool((model.body.weight != begun).all())}", flush=True)
    ddl.shutdown()


if __name__ == "__main__":
    main()
