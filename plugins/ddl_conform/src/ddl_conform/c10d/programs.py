"""Random programs of torch.distributed: many calls in groups that overlap, waited for in another order."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddl_conform.c10d.calls import GroupCall, expected, make, start

STEPS = 50  # before a rank is killed
PATIENCE_S = 10.0  # for the others, after the loss of a rank
REPEATED = 6  # a part of a program is repeated so often, so that it is replayed


def play(store: str, seeds: range, backend: str, rank: int, size: int) -> list[str]:
    """Run the programs of ``seeds`` on ``rank``, and return what was wrong.

    ``store``: the path of a new file, by which the ranks meet.
    """
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
    """Make the calls of one program. Wait for the asynchronous ones later, in another order."""
    part = [make(chance, list(groups)) for _ in range(chance.randrange(1, 6))]
    calls = [make(chance, list(groups), like) for _ in range(REPEATED) for like in part]
    calls += [make(chance, list(groups)) for _ in range(4)]
    if backend == "gloo":
        calls = [_for_gloo(call) for call in calls]
    modes = [chance.random() < 0.5 for _ in calls]
    order = chance.random()
    flying: list[tuple[GroupCall, Any, Any]] = []
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


def _for_gloo(call: GroupCall) -> GroupCall:
    """Return the call, or one like it where Gloo lacks the type, the operation, the layout or sizes that differ."""
    kind = "all_to_all_uneven" if call.kind == "all_to_all" else call.kind
    op = "SUM" if call.op == "AVG" else call.op
    dtype = torch.float64 if call.dtype in (torch.complex64, torch.bfloat16) else call.dtype
    return replace(call, kind=kind, op=op, dtype=dtype, gaps=False)


def _landed(flying: list[tuple[GroupCall, Any, Any]], rank: int) -> list[str]:
    wrong: list[str] = []
    for call, work, results in flying:
        work.wait()
        wrong += _compare(call, results(), call.members.index(rank))
    flying.clear()
    return wrong


def _compare(call: GroupCall, got: list[torch.Tensor], me: int) -> list[str]:
    wanted = expected(call, me)
    if len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted)):
        return []
    return [f"{call} on rank {me}: {got}, not {wanted}"]


def lose_a_rank(store: str, backend: str, rank: int, size: int) -> list[str]:
    """Repeat an allreduce until the last rank kills itself. Return what is wrong with the errors of the other ranks."""
    files = dist.FileStore(store, size)
    dist.init_process_group(backend, store=files, rank=rank, world_size=size)
    tensor = torch.ones(100)
    try:
        for step in range(10_000):
            if step == STEPS and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    except RuntimeError as error:
        named = f"rank {size - 1}" in str(error)
        files.add("told", 1)
        until_s = time.monotonic() + PATIENCE_S
        while rank == 0 and files.add("told", 0) < size - 1 and time.monotonic() < until_s:
            time.sleep(0.01)  # a backend may need rank 0 to tell the others
        return [] if named else [f"rank {rank}: the error does not name the rank that was killed: {error}"]
    return [f"rank {rank}: no error"]


def main() -> None:
    """Run one rank of ``ProcessGroupSuite``, and print what is wrong. The exit code is 1 if anything is."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file by which the ranks meet")
    parser.add_argument("--programs", type=int, default=0, help="how many; 0: the last rank is killed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.programs:
        wrong = play(given.store, range(given.programs), given.backend, given.rank, given.size)
    else:
        wrong = lose_a_rank(given.store, given.backend, given.rank, given.size)
    print(*wrong, sep="\n", flush=True)
    os._exit(bool(wrong))  # a group that has lost a rank need not end well


if __name__ == "__main__":
    main()
