"""Replay in worlds of threads, on real memory: the same bits as negotiation, and no hang when a rank dies."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddlcore as ddl
from ddlcore import api
from ddlcore.control.local import LocalNetwork
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.process.job import Job
from ddlcore.testing import World
from tests.runtime.effort import examples

pytestmark = pytest.mark.timeout(600)

Array = np.ndarray[Any, Any]
OPS = [ddl.Sum, ddl.Average, ddl.Min, ddl.Max, ddl.Product]


def train(rank: int, job: Job, seed: int, size: int, meet: threading.Barrier) -> list[bytes]:
    """Every kind, dtype, op and scale, in one or two threads; outputs are spoilt as soon as they were read."""
    common, own = random.Random(seed), random.Random(seed * 31 + rank)
    kinds = ["allreduce"] * 4 + ["inplace"] * 2 + ["grouped", "gather", "alltoall", "broadcast", "scatter"]
    tensors = []
    for i in range(common.randint(1, 7)):
        kind = common.choice(kinds)
        dtype = common.choice([np.float32, np.float64, np.float16, np.int32])
        op = common.choice(OPS if kind in ("allreduce", "inplace", "grouped") else OPS[:2])
        tensors.append((f"t{i}", kind, dtype, op, common.randint(1, 30), common.choice([1.0, 1.0, 0.5])))
    rows: list[list[bytes]] = [[], []]
    parts = [tensors[::2], tensors[1::2]] if common.random() < 0.3 else [tensors]

    def loop(index: int, mine: list[tuple[str, str, Any, ddl.ReduceOp, int, float]], rng: random.Random) -> None:
        with api.use_job(job):
            for step in range(10):
                rows[index] += _step(rank, size, step, mine, rng)

    if len(parts) == 2:
        other = threading.Thread(target=loop, args=(1, parts[1], random.Random(own.random())))
        other.start()
        loop(0, parts[0], own)
        other.join(120)
        assert not other.is_alive()
    else:
        loop(0, parts[0], own)
    meet.wait(80)
    return rows[0] + rows[1]


def _step(
    rank: int,
    size: int,
    step: int,
    tensors: list[tuple[str, str, Any, ddl.ReduceOp, int, float]],
    rng: random.Random,
) -> list[bytes]:
    handles = []
    tensors = list(tensors)
    rng.shuffle(tensors)
    for name, kind, dtype, op, count, scale in tensors:
        whole = np.dtype(dtype).kind == "i"
        values = np.random.default_rng([rank, step, count]).standard_normal(count + size)
        x: Array = (values * (3 if whole else 1)).astype(dtype)
        before, after = (1.0, 1.0) if whole else (scale, 1.5 * scale)
        op = ddl.Sum if whole and op == ddl.Average else op
        handle: ddl.Handle
        if kind == "allreduce":
            handle = ddl.allreduce_async(x, name=name, op=op, prescale_factor=before, postscale_factor=after)
        elif kind == "inplace":
            handle = ddl.allreduce_async_(x, name=name, op=op, prescale_factor=before, postscale_factor=after)
        elif kind == "grouped":
            handle = ddl.grouped_allreduce_async([x, x[:2] + x[:2]], name=name, op=op)
        elif kind == "gather":
            handle = ddl.allgather_async(x[: 1 + (step + rank) % count], name=name)
        elif kind == "alltoall":
            handle = ddl.alltoall_async(x[:size], [1] * size, name=name)
        elif kind == "broadcast":
            handle = ddl.broadcast_async(x, step and 0, name=name)
        else:
            handle = ddl.reducescatter_async(x, name=name, op=op)
        handles.append((name, x, handle))
    done = {}
    rng.shuffle(handles)
    for name, x, handle in handles:
        while rng.random() < 0.2 and not handle.poll():
            pass
        result = handle.wait()
        parts = result if isinstance(result, (list, tuple)) else [result]
        done[name] = b"".join(part.tobytes() for part in parts if isinstance(part, np.ndarray))
        x.fill(99)  # nothing of ddl's may read it from here on
    return [done[name] for name in sorted(done)]


@examples(12)
@given(
    st.integers(2, 4), st.integers(0, 1 << 30), st.sampled_from(["threads", "shm"]), st.sampled_from([0, 100, 1 << 20])
)
def test_the_bits_are_those_of_negotiation(size: int, seed: int, backend: str, fusion_bytes: int) -> None:
    """All kinds, dtypes, ops and scales; in place, grouped, ragged; one or two threads; memory spoilt after each wait."""
    results = []
    for replay in (False, True):
        meet = threading.Barrier(size)
        given_settings = {"fusion_bytes": fusion_bytes, "replay": replay}
        with World(size, backend=backend, settings=given_settings) as world:
            program = partial(train, seed=seed, size=size, meet=meet)
            results.append(world.run(program, deadline_s=20))
    assert results[0] == results[1]


@examples(25)
@given(st.integers(2, 4), st.integers(0, 1 << 30), st.sampled_from(["threads", "shm"]))
def test_a_death_at_any_moment_ends_every_wait(size: int, seed: int, backend: str) -> None:
    """One rank is lost at a random step, replayed or not: all others get PeerLost for what is unfinished, none hangs."""
    networks: list[LocalNetwork] = []
    original = LocalNetwork.__init__

    def remember(self: LocalNetwork, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        networks.append(self)

    rng = random.Random(seed)
    victim, last, within = rng.randrange(size), rng.randint(0, 25), rng.randint(0, 4)

    def program(rank: int, job: Job) -> str:
        try:
            for step in range(200):
                handles = []
                for i in range(5):
                    if rank == victim and step == last and i == within:
                        networks[0].rank_ended(LaunchedRank(rank), "killed by signal 9 (SIGKILL)")
                        return "dead"
                    handles.append(ddl.allreduce_async(np.full(3, 1.0), name=f"g{i}", op=ddl.Sum))
                for handle in handles:
                    assert handle.wait()[0] == size
        except ddl.PeerLost as error:
            return "told" if error.ranks == (victim,) else f"told of {error.ranks}"
        return "ended"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalNetwork, "__init__", remember)
        with World(size, backend=backend, settings={"replay": True}) as world:
            told = world.run(program, deadline_s=20)
    assert told == ["dead" if rank == victim else "told" for rank in range(size)]
