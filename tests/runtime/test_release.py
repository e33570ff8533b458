"""The release rule on streams: no work of the user's is ever queued behind a batch that can still be void.

Worlds of threads on pretend devices. Every operation on a tensor goes to a stream that dawdles, the host waits for
no stream until the end, and ranks leave replay at any moment: a batch that touched a tensor in vain, or a result
that was used before it stood, shows as a wrong value.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import ddlcore as ddl
from ddlcore.errors import DdlInternalError
from ddlcore.job import Job
from ddlcore.runtime.device_executor import DeviceExecutor
from ddlcore.runtime.devices import Lane
from ddlcore.runtime.executor import Later
from ddlcore.runtime.meter import Stats
from ddlcore.testing.pretend import KIND
from ddlcore.testing.pretend_tensors import PretendAdapter, PretendTensor, current_stream
from ddlcore.testing.pretend_world import PRETEND, PretendWorld
from tests.runtime.effort import examples

pytestmark = pytest.mark.timeout(240)

Array = np.ndarray[Any, Any]
Call = tuple[str, str, Any, ddl.ReduceOp, int, float]  # name, kind, dtype, op, elements, scale
OPS = [ddl.Sum, ddl.Average, ddl.Min, ddl.Max, ddl.Product]
WAYS = [("shm", KIND), ("threads", KIND), ("shm", "cpu"), ("threads", "cpu")]  # confirmed, by event, staged both ways
SPOILT = 99
STEPS = 12


class Plan:
    """What all ranks do, step by step: most steps are alike, in some of them a rank or all do something else."""

    def __init__(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        kinds = ["allreduce"] * 2 + ["inplace"] * 5 + ["grouped", "gather", "alltoall", "broadcast", "own", "scatter"]
        self.calls: list[Call] = []
        for i in range(rng.randint(1, 6)):
            kind = rng.choice(kinds)
            halves = [np.float16] * (
                kind != "scatter"
            )  # averages of these are scaled at another place: other roundings
            dtype = rng.choice([np.float32, np.float64, np.int32, *halves])
            op = rng.choice(OPS if kind in ("allreduce", "inplace", "grouped") else OPS[:2])
            self.calls.append((f"t{i}", kind, dtype, op, rng.randint(1, 30), rng.choice([1.0, 1.0, 0.5])))
        self.oddities = [rng.choice(["", "", "", "wild", "metric", "subset"]) for _ in range(STEPS)]
        self.loners = [rng.randrange(size) for _ in range(STEPS)]
        self.subsets = [rng.sample(self.calls, rng.randint(0, len(self.calls))) for _ in range(STEPS)]

    def of(self, step: int, rank: int) -> tuple[list[Call], bool]:
        """The calls of a step, and whether this rank waits for some before it makes the others."""
        oddity = self.oddities[step]
        calls = self.subsets[step] if oddity == "subset" else list(self.calls)
        if oddity == "metric":
            calls = [*calls, (f"metric{step % 2}", "inplace", np.float64, ddl.Average, 3, 1.0)]
        return calls, oddity == "wild" and self.loners[step] == rank


class Seen:
    """The values that the user's stream finds, read by what stands on it, in the order of ``names``."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str, int], Array] = {}

    def read(self, key: tuple[int, str, int], tensor: PretendTensor) -> None:
        """Queued, as an optimizer's step is."""
        tensor.change(lambda array: self.values.update({key: array.copy()}))

    def bits(self) -> list[bytes]:
        """All of them. The stream has come to its end."""
        return [self.values[key].tobytes() for key in sorted(self.values)]


def train(rank: int, job: Job, seed: int, size: int) -> tuple[list[bytes], Stats]:
    plan, rng, seen = Plan(seed, size), random.Random(seed * 31 + rank), Seen()
    for step in range(STEPS):
        calls, wild = plan.of(step, rank)
        rng.shuffle(calls)
        handles: list[tuple[str, Any, Any]] = []
        for call in calls:
            x = _values(call, rank, step, size)
            tensor = PretendTensor.of(x)
            handles.append((call[0], tensor, _start(call, tensor, step, rank, size)))
            if wild and rng.random() < 0.5:
                _finish(handles, step, seen)
        rng.shuffle(handles)
        _finish(handles, step, seen)
    current_stream().record().wait(20.0)
    return seen.bits(), job.stats()


def _values(call: Call, rank: int, step: int, size: int) -> Array:
    name, _, dtype, _, count, _ = call
    whole = np.dtype(dtype).kind == "i"
    values = np.random.default_rng([rank, step, count, *name.encode()]).standard_normal(count + size)
    return (values * (3 if whole else 1)).astype(dtype)


def _start(call: Call, x: PretendTensor, step: int, rank: int, size: int) -> Any:
    name, kind, dtype, op, count, scale = call
    whole = np.dtype(dtype).kind == "i"
    op = ddl.Sum if whole and op == ddl.Average else op
    scales: Any = {} if whole else {"prescale_factor": scale, "postscale_factor": 1.5 * scale}
    if kind == "allreduce":
        return PRETEND.allreduce_async(x, name=name, op=op, **scales)
    if kind == "inplace":
        return PRETEND.allreduce_async(x, output=x, name=name, op=op, **scales)
    if kind == "grouped":
        return PRETEND.grouped_allreduce_async([x, x], name=name, op=op)
    if kind == "gather":
        rows = 1 + (step + rank) % count
        return PRETEND.allgather_async(PretendTensor(x.memory, (rows,), x.dtype, x.runtime), name=name)
    if kind == "alltoall":
        part = PretendTensor(x.memory, (size,), x.dtype, x.runtime)
        return PRETEND.alltoall_async(part, [1] * size, name=name)
    if kind == "broadcast":
        return PRETEND.broadcast_async(x, step % size, name=name)
    if kind == "own":
        return PRETEND.broadcast_async(x, step % size, output=x, name=name)
    return PRETEND.reducescatter_async(x, name=name, op=op)


def _finish(handles: list[tuple[str, Any, Any]], step: int, seen: Seen) -> None:
    for name, x, handle in handles:
        result = handle.wait()
        parts = result if isinstance(result, (list, tuple)) else [result]
        for i, part in enumerate(part for part in parts if isinstance(part, PretendTensor)):
            seen.read((step, name, i), part)
        x.change(lambda array: array.fill(SPOILT))  # nothing of ddl's may read it from here on
    handles.clear()


def on_host(seed: int, size: int) -> list[list[bytes]]:
    """The oracle: the same tensors, reduced one after the other by negotiation in host memory."""
    with PretendWorld(size, backend="threads", route="cpu", settings={"replay": False, "fusion_bytes": 0}) as world:
        return [bits for bits, _ in world.on_streams(partial(train, seed=seed, size=size))]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way))
@examples(8)
@given(seed=st.integers(0, 1 << 30), size=st.integers(2, 3), fusion_bytes=st.sampled_from([0, 100, 1 << 20]))
def test_what_the_stream_sees_is_what_negotiation_gives(
    way: tuple[str, str], seed: int, size: int, fusion_bytes: int
) -> None:
    """All kinds, types, ops and scales, in place and not; ranks leave replay in the middle; nobody waits on the host."""
    backend, route = way
    with PretendWorld(size, backend=backend, route=route, settings={"fusion_bytes": fusion_bytes}) as world:
        played = world.on_streams(partial(train, seed=seed, size=size), deadline_s=60)
    event(f"void {sum(stats['batches_void'] for _, stats in played) > 0}")
    assert [bits for bits, _ in played] == on_host(seed, size)


# --- the property bites: what it is to notice, when it is there


def _without_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "after", lambda self, buffers: None)


def _without_a_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PretendAdapter, "after", lambda self, event, tensors: None)


def _with_nothing_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "keep", lambda self, event, kept: None)


def _before_the_verdict(patch: pytest.MonkeyPatch) -> None:
    """Results go to the user's tensors as soon as they are queued, while the batch may still be void."""
    original = DeviceExecutor._apart

    def hasty(self: DeviceExecutor, route: Any, one: Any, launch: Any, use: str) -> Later:
        later = original(self, route, one, launch, use)
        if launch.entries is None or use == "dummy":
            return later
        outcomes = later.deliver()
        return Later(later.event, lambda: outcomes)

    patch.setattr(DeviceExecutor, "_apart", hasty)


@pytest.mark.parametrize(
    ("way", "mutate"),
    [
        (WAYS[0], _without_events),
        (WAYS[2], _without_events),
        (WAYS[0], _without_a_fence),
        (WAYS[2], _without_a_fence),
        (WAYS[2], _with_nothing_kept),
        (WAYS[1], _before_the_verdict),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "-".join(value),
)
def test_each_of_these_is_noticed(way: tuple[str, str], mutate: Callable[[pytest.MonkeyPatch], None]) -> None:
    """An engine that does not wait, a handle that does not, memory that is let go, a result that comes too soon."""
    for seed in range(20):
        size = 2 + seed % 2
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                with PretendWorld(size, backend=way[0], route=way[1]) as world:
                    played = world.on_streams(partial(train, seed=seed, size=size), deadline_s=60)
            except DdlInternalError:  # the pretend device has noticed it itself
                return
        if [bits for bits, _ in played] != on_host(seed, size):
            return
    pytest.fail("no program of twenty has shown it")
