"""One rank that trains models on its device with ddl, with DDP and alone, in turn; started alone, or by ddl run.

It checks that ddl replays and that all contenders end with the same parameters; with --rounds it compares the times of
a step.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator

import ddl_torch as ddl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tools.gpu.rows import Row, check, number, tell
from tools.training.on_torch import TorchContender
from tools.training.on_torch.models import WORKLOADS

__all__ = ["main"]

WARM_STEPS = 15  # by then ddl has found the period and replays, and DDP has rebuilt its buckets
BLOCK_S = 0.3  # how long one contender trains, about, before the next has its turn


def _contenders(model: str, device: str, peer: str) -> dict[str, TorchContender]:
    """Return the contenders, with equal weights and inputs; the one without ddl only if this rank is alone."""
    workload = WORKLOADS[model]
    torch.manual_seed(0)
    first = workload.make().to(device)
    own = torch.Generator().manual_seed(1 + ddl.rank())
    batches = [
        (inputs.to(device), classes.to(device))
        for inputs, classes in (workload.batch(workload.samples, own) for _ in range(4))
    ]
    made = {}
    for name in ("none", peer, "ddl") if ddl.size() == 1 else (peer, "ddl"):
        trained: nn.Module = copy.deepcopy(first)
        if name == peer:
            trained = DistributedDataParallel(trained)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-4, momentum=0.9)
        if name == "ddl":
            ddl.broadcast_parameters(trained.state_dict(), root_rank=0)
            optimizer = ddl.DistributedOptimizer(optimizer, named_parameters=trained.named_parameters())
        made[name] = TorchContender(trained, optimizer, batches, None)
    return made


def _apart(contenders: dict[str, TorchContender]) -> str:
    ours = list(contenders["ddl"].model.parameters())
    for name, contender in contenders.items():
        for mine, theirs in zip(ours, contender.model.parameters()):
            if not torch.allclose(mine, theirs, rtol=1e-2, atol=1e-4):
                return f"ddl and {name} have trained apart, by {float((mine - theirs).abs().max()):g}"
    return ""


def _step_s(contender: TorchContender, steps: int, finish: Callable[[], None]) -> float:
    finish()
    begun = time.perf_counter()
    for _ in range(steps):
        contender.step()
    finish()
    return (time.perf_counter() - begun) / steps


def _timed(contenders: dict[str, TorchContender], rounds: int, finish: Callable[[], None]) -> dict[str, list[float]]:
    """Return the seconds of a step, by contender and round; rank 0 decides how many steps a block has."""
    slowest = max(_step_s(contender, 3, finish) for contender in contenders.values())
    steps = int(ddl.broadcast(torch.tensor([max(3, min(200, round(BLOCK_S / slowest)))]), root_rank=0).item())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds):
        names = list(contenders)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            _step_s(contenders[name], max(1, steps // 5), finish)
            seconds[name].append(_step_s(contenders[name], steps, finish))
    return seconds


def _of_model(model: str, asked: argparse.Namespace, finish: Callable[[], None]) -> Iterator[Row]:
    contenders = _contenders(model, asked.device, asked.peer)
    for contender in contenders.values():
        _step_s(contender, WARM_STEPS, finish)
    fault = _apart(contenders)
    before = ddl.stats()["buckets_replayed"]
    for contender in contenders.values():  # each takes as many steps, so that their parameters must stay equal
        _step_s(contender, 5, finish)
    replays = ddl.stats()["buckets_replayed"] > before
    if ddl.size() > 1 and not replays:  # a single rank may have nothing to reduce
        fault = fault or "ddl has not replayed"
    fault = fault or _apart(contenders)
    ranks = "alone" if ddl.size() == 1 else f"{ddl.size()} ranks"
    yield check(
        f"{model}, {ranks}: {'replays, ' * replays}trains as {', '.join(n for n in contenders if n != 'ddl')}",
        "",
        fault,
        asked.stand_in,
    )
    if not asked.rounds or fault:
        return
    seconds = _timed(contenders, asked.rounds, finish)
    limits = {"none": asked.over_none, asked.peer: asked.over_peer}
    for name, limit in limits.items():
        if name in seconds:
            ratios = [ours / theirs for ours, theirs in zip(seconds["ddl"], seconds[name])]
            title = {"none": "without ddl"}.get(name, f"DDP on {asked.backend}")
            yield number(f"{model}, {ranks}: step over {title}", ratios, limit, "×")


def _rows(asked: argparse.Namespace) -> Iterator[Row]:
    if asked.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    finish: Callable[[], None] = torch.cuda.synchronize if asked.device == "cuda" else lambda: None
    ddl.init()
    dist.init_process_group(
        asked.backend, init_method=f"file://{asked.meeting}", rank=ddl.rank(), world_size=ddl.size()
    )
    try:
        for model in asked.models.split(","):
            try:
                rows = list(_of_model(model, asked, finish))
            except Exception as error:
                rows = [check(f"{model}: training", "", f"{type(error).__name__}: {error}", asked.stand_in)]
            if ddl.rank() == 0:
                yield from rows
            if any(row.why for row in rows):
                break
    finally:
        dist.destroy_process_group()
        ddl.shutdown()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="deep,gpt,resnet")
    parser.add_argument("--backend", default="nccl", help="backend of DDP")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--over-none", type=float, default=1.03)
    parser.add_argument("--over-peer", type=float, default=1.0)
    parser.add_argument("--meeting", required=True, help="a file by which torch's processes meet")
    parser.add_argument("--stand-in", default="")
    asked = parser.parse_args()
    asked.peer = "ddp"
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    tell(_rows(asked))


if __name__ == "__main__":
    main()
