"""The four trainings on torch: alone, with a barrier in each step, with DDP on Gloo, with ddl."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tools.training.contenders import Trainings
from tools.training.meeting import Meeting
from tools.training.on_torch.models import WORKLOADS, Batch, Workload

__all__ = ["trainings"]

BATCHES = 4  # different inputs of a rank, used in turn
LEARNING_RATE = 1e-4  # small: training on noise must not diverge


class TorchContender:
    """A model with its optimizer, and how many steps it has taken. ``meet`` is called before each update."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], meet: Callable[[], None] | None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._batches = batches
        self._meet = meet
        self._taken = 0

    def step(self) -> None:
        inputs, classes = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(inputs), classes).backward()
        if self._meet is not None:
            self._meet()
        self.update()

    def update(self) -> None:
        self.optimizer.step()

    def steps(self, count: int) -> float:
        """Take ``count`` steps, and return the seconds of one."""
        begun_s = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - begun_s) / count


class DdlContender(TorchContender):
    """A contender that times the end of backward: ``waiting`` has the share of each step that it waits there for ddl."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.waiting: list[float] = []
        self._waited_s = 0.0

    def step(self) -> None:
        begun_s, self._waited_s = time.perf_counter(), 0.0
        super().step()
        self.waiting.append(self._waited_s / (time.perf_counter() - begun_s))

    def update(self) -> None:
        ours: Any = self.optimizer
        reducer = ours._ddl
        if "_complete" not in vars(reducer):  # backward waits in it at its end
            complete = reducer._complete

            def timed() -> None:
                begun_s = time.perf_counter()
                complete()
                self._waited_s += time.perf_counter() - begun_s

            reducer._complete = timed
        ours.step()


def _contenders(workload: Workload, meet: Meeting) -> dict[str, TorchContender]:
    """Return all contenders, with equal weights and the same inputs of this rank."""
    torch.manual_seed(0)
    first = workload.make()
    own = torch.Generator().manual_seed(1 + meet.rank)
    batches = [workload.batch(workload.samples, own) for _ in range(BATCHES)]
    made = {}
    for name in ("none", "barrier", "ddp", "ddl"):
        model = copy.deepcopy(first)
        trained: nn.Module = DistributedDataParallel(model) if name == "ddp" else model
        optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE, momentum=workload.momentum)
        if name == "ddl":
            optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            ddl.broadcast_parameters(model.state_dict(), root_rank=0)
        kind = DdlContender if name == "ddl" else TorchContender
        made[name] = kind(trained, optimizer, batches, meet if name == "barrier" else None)
    return made


def _check_agreement(contenders: dict[str, TorchContender]) -> None:
    """Raise RuntimeError unless ddl and DDP have the same parameters after as many steps."""
    for ours, theirs in zip(contenders["ddl"].model.parameters(), contenders["ddp"].model.parameters()):
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5):
            raise RuntimeError(f"ddl and DDP have trained apart, by {float((ours - theirs).abs().max()):g}")


@contextlib.contextmanager
def trainings(model: str, meet: Meeting) -> Iterator[Trainings]:
    """Yield all four contenders of this rank. Every rank calls this, after initializing ddl."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        workload = WORKLOADS[model]
        contenders = _contenders(workload, meet)
        ours = contenders["ddl"]
        assert isinstance(ours, DdlContender)
        sizes = [parameter.numel() for parameter in contenders["none"].model.parameters()]
        yield Trainings(contenders, workload.samples, sizes, lambda: _check_agreement(contenders), lambda: ours.waiting)
    finally:
        dist.destroy_process_group()
