"""Trains one model in four ways in the same processes, in alternation, and takes the times; judges nothing."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tools.training.models import WORKLOADS, Batch, Workload

__all__ = ["CONTENDERS", "Barrier", "Measured", "measure"]

CONTENDERS = ("none", "barrier", "ddp", "ddl")
WARM_STEPS = 12  # ddl has found the period and replays, DDP has rebuilt its buckets
BLOCK_S = 0.25  # about how long one contender trains before the next has its turn
LEAST_STEPS, MOST_STEPS = 1, 50  # of such a block
WARM_SHARE = 5  # so many times fewer steps are taken untimed before: small models must find their memory in the caches
BATCHES = 4  # inputs that a rank takes in turn
LEARNING_RATE = 1e-4  # small: what is learned from noise must not diverge
LINE = 64  # bytes of a cache line
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Measured:
    """One model's run. ``seconds`` of a step, by contender and round: the mean over the ranks."""

    model: str
    ranks: int
    samples: int  # of one rank's step
    parameters: int
    tensors: int
    steps: int  # of a block
    seconds: dict[str, list[float]]
    control_messages: float  # ddl's, a step, over the timed blocks: the most of any rank
    replayed: float  # ddl's batches run from memory, a step, likewise the least
    divergences: int  # how often a rank asked to leave replay meanwhile, all ranks together


class Barrier:
    """Counters in shared memory that each rank raises and watches: a barrier that owes nothing to a contender.

    A waiting rank yields its core at each look. Made and called by every rank; TimeoutError after 60 s.
    """

    def __init__(self, rank: int, ranks: int, path: str) -> None:
        with open(path, "r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), ranks * LINE)).cast("Q")
        self._mine = rank * LINE // 8
        self._others = [other * LINE // 8 for other in range(ranks) if other != rank]
        self._turn = 0

    @classmethod
    def make(cls) -> Barrier:
        """Of all ranks of torch's default group."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        name: list[Any] = [None]
        if rank == 0:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            fd, name[0] = tempfile.mkstemp(prefix="barrier", dir=folder)
            os.truncate(fd, ranks * LINE)
            os.close(fd)
        dist.broadcast_object_list(name)
        made = cls(rank, ranks, name[0])
        dist.barrier()
        if rank == 0:
            Path(name[0]).unlink()
        return made

    def __call__(self) -> None:
        self._turn += 1
        self._counters[self._mine] = self._turn
        until_s = time.monotonic() + PATIENCE_S
        for other in self._others:
            while self._counters[other] < self._turn:
                os.sched_yield()
                if time.monotonic() > until_s:
                    raise TimeoutError("a rank does not come to the barrier")


class Contender:
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
        self.optimizer.step()

    def steps(self, count: int) -> float:
        """Seconds of one of ``count`` steps."""
        begun_s = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - begun_s) / count


def _contenders(workload: Workload, meet: Barrier) -> dict[str, Contender]:
    """All of them from the same start on the same inputs of this rank."""
    torch.manual_seed(0)
    first = workload.make()
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [workload.batch(workload.samples, own) for _ in range(BATCHES)]
    made = {}
    for name in CONTENDERS:
        model = copy.deepcopy(first)
        trained: nn.Module = DistributedDataParallel(model) if name == "ddp" else model
        optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE, momentum=0.9)
        if name == "ddl":
            optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            ddl.broadcast_parameters(model.state_dict(), root_rank=0)
        made[name] = Contender(trained, optimizer, batches, meet if name == "barrier" else None)
    return made


def _check_agreement(contenders: dict[str, Contender]) -> None:
    """RuntimeError unless ddl and DDP, after as many steps, have come to the same parameters."""
    for ours, theirs in zip(contenders["ddl"].model.parameters(), contenders["ddp"].model.parameters()):
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5):
            raise RuntimeError(f"ddl and DDP have trained apart, by {float((ours - theirs).abs().max()):g}")


def _of_ranks(value: float) -> list[float]:
    """What each rank has there."""
    all_values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, torch.tensor([value], dtype=torch.float64))
    return [float(each) for each in all_values]


def _block_steps(contenders: dict[str, Contender], meet: Barrier) -> int:
    """Of the timed blocks, so that the slowest contender takes about BLOCK_S; the same on every rank."""
    slowest_s = 0.0
    for contender in contenders.values():
        meet()
        slowest_s = max(slowest_s, *_of_ranks(contender.steps(3)))
    return max(LEAST_STEPS, min(MOST_STEPS, round(BLOCK_S / slowest_s)))


def measure(name: str, rounds: int, terminal: str = "") -> Measured:
    """Trains model ``name`` on all ranks, each of which calls this with the same arguments.

    A round gives each contender a block of steps, in an order that is shuffled alike on every rank. Each
    block of short steps begins with some that are not timed. ``terminal``: the device on which rank 0 shows progress.
    """
    torch.set_num_threads(1)
    ddl.init()
    dist.init_process_group("gloo")
    try:
        return _measure(WORKLOADS[name], rounds, terminal if ddl.rank() == 0 else "")
    finally:
        dist.destroy_process_group()
        ddl.shutdown()


def _measure(workload: Workload, rounds: int, terminal: str) -> Measured:
    meet = Barrier.make()
    contenders = _contenders(workload, meet)
    for contender in contenders.values():
        meet()
        contender.steps(WARM_STEPS)
    _check_agreement(contenders)
    steps = _block_steps(contenders, meet)
    own: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    order = list(CONTENDERS)
    shuffle = random.Random(0).shuffle
    counted = {"control_messages": 0, "batches_replayed": 0, "divergences": 0}
    for _ in _shown(rounds, workload.name, terminal):
        shuffle(order)
        for turn in order:
            contender = contenders[turn]
            for _ in range(steps // WARM_SHARE):
                contender.step()
            meet()
            before = ddl.stats()
            own[turn].append(contender.steps(steps))
            meet()
            if turn == "ddl":
                after = ddl.stats()
                counted = {key: counted[key] + after[key] - before[key] for key in counted}
    of_ranks = {turn: [_of_ranks(value) for value in values] for turn, values in own.items()}
    parameters = list(contenders["none"].model.parameters())
    timed = rounds * steps
    return Measured(
        model=workload.name,
        ranks=dist.get_world_size(),
        samples=workload.samples,
        parameters=sum(parameter.numel() for parameter in parameters),
        tensors=len(parameters),
        steps=steps,
        seconds={turn: [sum(each) / len(each) for each in values] for turn, values in of_ranks.items()},
        control_messages=max(_of_ranks(counted["control_messages"])) / timed,
        replayed=min(_of_ranks(counted["batches_replayed"])) / timed,
        divergences=round(sum(_of_ranks(counted["divergences"]))),
    )


def _shown(rounds: int, name: str, terminal: str) -> Iterator[int]:
    """The rounds, with a bar on ``terminal`` where there is one."""
    if not terminal:
        yield from range(rounds)
        return
    from rich.console import Console
    from rich.progress import track

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(terminal, "w", encoding="utf-8"))
        yield from track(range(rounds), name, console=Console(file=file), transient=True)
