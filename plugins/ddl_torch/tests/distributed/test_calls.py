"""Random programs of torch.distributed on worlds of processes: every result is what it must be."""

from __future__ import annotations

import os
import random
from dataclasses import replace
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

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason=WORLDS_NEED),
]

WORLDS = {  # of each, how many programs
    "shm/000/off/replay": 70,
    "gloo/000/off/replay": 40,
    "shm+gloo/0011/off/replay": 40,
    "shm/00/off/negotiated": 50,
}
SOAK = 25  # times as many
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
    if backend == "gloo":
        calls = [_for_gloo(call) for call in calls]
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


def _for_gloo(call: Call) -> Call:
    """Return the call, or one like it where Gloo lacks the type, the operation, the layout or sizes that differ."""
    kind = "all_to_all_uneven" if call.kind == "all_to_all" else call.kind
    op = "SUM" if call.op == "AVG" else call.op
    dtype = torch.float64 if call.dtype in (torch.complex64, torch.bfloat16) else call.dtype
    return replace(call, kind=kind, op=op, dtype=dtype, gaps=False)


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


def run(world: str, folder: Path, seeds: range, backend: str = "ddl") -> None:
    """Run the programs of ``seeds`` in a world of processes, and check that nothing was wrong."""
    found = run_function(Spec.parse(world), partial(play, str(folder / "store"), seeds, backend))
    assert [wrong[:3] for wrong in found] == [[]] * len(found)


@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(world: str, tmp_path: Path) -> None:
    """Groups overlap, calls are synchronous or not, types, shapes, operations and layouts are random; parts repeat."""
    run(world, tmp_path, range(WORLDS[world]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_random_programs(world: str, tmp_path: Path) -> None:
    for time in range(1, SOAK + 1):
        folder = tmp_path / str(time)
        folder.mkdir()
        run(world, folder, range(time * WORLDS[world], (time + 1) * WORLDS[world]))


def test_gloo_gives_the_same(tmp_path: Path) -> None:
    """What is expected of ddl is what torch's Gloo gives, as far as it has the types and operations."""
    run("shm/000/off/replay", tmp_path, range(20), "gloo")
