"""Random programs of torch.distributed on worlds of processes: every result is what it must be."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddl_torch.distributed.group import create

from tests.semantics.running import WORLDS_NEED
from tests.semantics.worlds import Spec, run_function

from .calls import Call, expected, make, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WORLDS = {
    "shm/000/off/replay": 40,
    "gloo/000/off/replay": 20,
    "shm+gloo/0011/off/replay": 20,
    "shm/00/off/negotiated": 20,
}
REPEATED = 6  # a part of a program is repeated so often, so that it is replayed


def play(store: str, seeds: range, backend: str, rank: int, size: int) -> list[str]:
    """Run the programs of ``seeds`` on one rank, and return what was wrong."""
    if backend == "ddl":
        dist.Backend.register_backend("ddl", create, extended_api=True, devices=["cpu"])
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    everyone = tuple(range(size))
    some = {everyone, (0, 1), (0, size - 1), everyone}
    groups: dict[tuple[int, ...], Any] = {members: dist.new_group(list(members)) for members in sorted(some)}
    groups[everyone] = dist.group.WORLD
    wrong: list[str] = []
    for seed in seeds:
        wrong += [f"seed {seed}: {text}" for text in _program(random.Random(seed), groups, rank, backend)]
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def _program(chance: random.Random, groups: dict[tuple[int, ...], Any], rank: int, backend: str) -> list[str]:
    """Make the calls of one program; the works of asynchronous calls are waited for later, in another order."""
    part = [make(chance, list(groups)) for _ in range(chance.randrange(1, 6))]
    calls = [make(chance, list(groups), like) for _ in range(REPEATED) for like in part]
    calls += [make(chance, list(groups)) for _ in range(4)]
    modes = [chance.random() < 0.5 for _ in calls]
    order = chance.random()
    flying: list[tuple[Call, Any, Any]] = []
    wrong: list[str] = []
    for call, async_op in zip(calls, modes):
        if rank not in call.members:
            continue
        me = call.members.index(rank)
        work, results = start(call, groups[call.members], me, async_op)
        if async_op:
            flying.append((call, work, results))
        else:
            wrong += _compare(call, results(), me)
        if len(flying) > 3:
            random.Random(order).shuffle(flying)
            wrong += _landed(flying, rank)
    return wrong + _landed(flying, rank)


def _landed(flying: list[tuple[Call, Any, Any]], rank: int) -> list[str]:
    wrong: list[str] = []
    for call, work, results in flying:
        work.wait()
        wrong += _compare(call, results(), call.members.index(rank))
    flying.clear()
    return wrong


def _compare(call: Call, got: list[torch.Tensor], me: int) -> list[str]:
    wanted = expected(call, me)
    if len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted)):
        return []
    return [f"{call} on rank {me}: {got}, not {wanted}"]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason=WORLDS_NEED)
@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(world: str, tmp_path: Path) -> None:
    """Groups overlap, calls are synchronous or not, types, shapes, operations and layouts are random; parts repeat."""
    found = run_function(Spec.parse(world), partial(play, str(tmp_path / "store"), range(WORLDS[world]), "ddl"))
    assert [wrong[:3] for wrong in found] == [[]] * len(found)
