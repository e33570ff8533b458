"""Wraps models in DistributedDataParallel and their optimizers in DistributedOptimizer; prints what rank 0 gets.

It is run on four ranks, with a path at which torch's ranks may meet once more.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def optimizer_of(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)  # type: ignore[arg-type]


def wrapped_before() -> str:
    model = DistributedDataParallel(nn.Linear(2, 1))
    return str(optimizer_of(model))


def wrapped_after() -> str:
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    wrapped = DistributedDataParallel(model)
    return f"{wrapped} {optimizer}"


def wrapped_in_part() -> str:
    """Only a part of the model is wrapped."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = optimizer_of(model)
    model[1] = DistributedDataParallel(model[1])
    return f"{model} {optimizer}"


def other_parameters() -> str:
    """One model for each of the two, as the networks of a GAN may have."""
    first, second = nn.Linear(2, 1), DistributedDataParallel(nn.Linear(2, 1))
    optimizer = optimizer_of(first)
    third = DistributedDataParallel(nn.Linear(2, 1))
    assert optimizer is not None and second is not None and third is not None
    return "both work"


def dropped_before() -> str:
    """An optimizer that the program no longer has is not in the way, even if it was part of a cycle."""
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    optimizer.itself = optimizer  # type: ignore[attr-defined]
    del optimizer
    DistributedDataParallel(model)
    return "only one is left"


def two_levels() -> str:
    """DDP averages within pairs of ranks, ddl across the pairs: together over all four."""
    rank, size = ddl.rank(), ddl.size()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [ddl.add_process_set([0, 2]), ddl.add_process_set([1, 3])]
    model = nn.Linear(1, 1, bias=False)
    optimizer = optimizer_of(model, process_set=across[rank % 2])
    wrapped = DistributedDataParallel(model, process_group=pairs[rank // 2])
    del optimizer
    return f"{size} ranks, {type(wrapped).__name__}"


def numbered_otherwise() -> str:
    """torch's rank 0 is ddl's rank 3."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}", rank=ddl.size() - 1 - ddl.rank(), world_size=ddl.size()
    )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddl").addHandler(handler)
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    wrapped = DistributedDataParallel(model)
    assert optimizer is not None and wrapped is not None
    return f"warned: {lines}"


SCENES: tuple[Callable[[], str], ...] = (
    wrapped_before,
    wrapped_after,
    wrapped_in_part,
    other_parameters,
    dropped_before,
    two_levels,
    numbered_otherwise,
)


def main() -> None:
    ddl.init()
    dist.init_process_group("gloo")
    for scene in SCENES:
        try:
            text = scene()
        except ValueError as error:
            text = f"{type(error).__name__}: {error}"
        ddl.barrier()
        gc.collect()  # what the scene has made and a traceback has kept
        if ddl.rank() == 0:
            print(f"{scene.__name__}: {text}".replace("\n", " "), flush=True)
    dist.destroy_process_group()
    ddl.shutdown()


if __name__ == "__main__":
    main()
