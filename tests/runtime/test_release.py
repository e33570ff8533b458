"""The release rule on streams: no work of the user's is ever queued behind a bucket that can still be void.

Worlds of threads on pretend devices. Every operation on a tensor goes to a stream that dawdles, the host waits for
no stream until the end, and ranks leave replay at any moment: a bucket that touched a tensor in vain, or a result
that was used before it stood, shows as a wrong value.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from ddl_conform.pretend import KIND
from ddl_conform.pretend_tensors import PretendAdapter, PretendTensor, current_stream
from ddl_conform.pretend_world import PRETEND, PretendWorld
from ddl_conform.ranks import DeadlinePassed
from hypothesis import event, given
from hypothesis import strategies as st

import ddlcore as ddl
from ddlcore.errors import DdlInternalError
from ddlcore.process.job import Job
from ddlcore.runtime.delivery import Later
from ddlcore.runtime.device.devices import DeviceStream
from ddlcore.runtime.device.executor import DeviceExecutor
from ddlcore.runtime.device.routes import Commit
from ddlcore.runtime.engine import Engine
from ddlcore.runtime.meter import Stats
from tests.runtime.effort import examples
from tests.tiers import long

pytestmark = pytest.mark.timeout(600)

Array = np.ndarray[Any, Any]
Call = tuple[str, str, Any, ddl.ReduceOp, int, float]  # name, kind, dtype, op, elements, scale
OPS = [ddl.Sum, ddl.Average, ddl.Min, ddl.Max, ddl.Product]
CONFIRMED, COMMITTED, BY_EVENT = ("shm", KIND), ("threads", KIND), ("mute", KIND)
STAGED = [("shm", "cpu"), ("threads", "cpu")]  # all or nothing, and not
WAYS = [CONFIRMED, COMMITTED, BY_EVENT, *STAGED]
APART = "apart"  # in the process set of the first rank and the last
SPOILT = 99
STEPS = 14
LEARNT = 5  # steps after which a loop is replayed


class Plan:
    """What all ranks do, step by step: most steps are alike, in some of them a rank or all do something else."""

    def __init__(self, seed: int, size: int) -> None:
        rng = random.Random(seed)
        kinds = ["allreduce"] * 2 + ["inplace"] * 5 + ["grouped", "gather", "alltoall", "broadcast", "own", "scatter"]
        kinds += [APART] * 2
        self.calls: list[Call] = []
        for i in range(rng.randint(1, 6)):
            kind = rng.choice(kinds)
            halves = [np.float16] * (
                kind != "scatter"
            )  # averages of these are scaled at another place: other roundings
            dtype = rng.choice([np.float32, np.float64, np.int32, *halves])
            op = rng.choice(OPS if kind in ("allreduce", "inplace", "grouped", APART) else OPS[:2])
            self.calls.append((f"t{i}", kind, dtype, op, rng.randint(1, 30), rng.choice([1.0, 1.0, 0.5])))
        self.oddities = [rng.choice(["", "", "", "wild", "metric", "subset"]) for _ in range(STEPS)]
        if rng.random() < 0.75:
            self.oddities[:LEARNT] = [""] * LEARNT
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
    ends = ddl.add_process_set([0, size - 1]) if size > 2 else ddl.global_process_set
    for step in range(STEPS):
        calls, wild = plan.of(step, rank)
        rng.shuffle(calls)
        handles: list[tuple[str, Any, Any]] = []
        for call in calls:
            if call[1] == APART and rank not in (0, size - 1):
                continue
            x = _values(call, rank, step, size)
            tensor = PretendTensor.of(x)
            handles.append((call[0], tensor, _start(call, tensor, step, rank, size, ends)))
            if wild and rng.random() < 0.5:
                _finish(handles, step, seen)
        rng.shuffle(handles)
        _finish(handles, step, seen)
    current_stream().record().wait(80.0)
    return seen.bits(), job.stats()


def _values(call: Call, rank: int, step: int, size: int) -> Array:
    name, _, dtype, _, count, _ = call
    whole = np.dtype(dtype).kind == "i"
    values = np.random.default_rng([rank, step, count, *name.encode()]).standard_normal(count + size)
    return (values * (3 if whole else 1)).astype(dtype)


def _start(call: Call, x: PretendTensor, step: int, rank: int, size: int, ends: ddl.ProcessSet) -> Any:
    name, kind, dtype, op, count, scale = call
    whole = np.dtype(dtype).kind == "i"
    op = ddl.Sum if whole and op == ddl.Average else op
    scales: Any = {} if whole else {"prescale_factor": scale, "postscale_factor": 1.5 * scale}
    if kind == "allreduce":
        return PRETEND.allreduce_async(x, name=name, op=op, **scales)
    if kind == "inplace":
        return PRETEND.allreduce_async(x, output=x, name=name, op=op, **scales)
    if kind == APART:
        return PRETEND.allreduce_async(x, output=x, name=name, op=op, process_set=ends, **scales)
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


@pytest.mark.parametrize("way", [WAYS[0], *long(*((one,) for one in WAYS[1:]))], ids=lambda way: "-".join(way))
@examples(8)
@given(seed=st.integers(0, 1 << 30), size=st.integers(2, 3), fusion_bytes=st.sampled_from([0, 100, 1 << 20]))
def test_what_the_stream_sees_is_what_negotiation_gives(
    way: tuple[str, str], seed: int, size: int, fusion_bytes: int
) -> None:
    """All kinds, types, ops and scales, in place and not; ranks leave replay in the middle; nobody waits on the host."""
    backend, route = way
    with PretendWorld(size, backend=backend, route=route, settings={"fusion_bytes": fusion_bytes}) as world:
        played = world.on_streams(partial(train, seed=seed, size=size), deadline_s=60)
    event(f"void {sum(stats['buckets_void'] for _, stats in played) > 0}")
    assert [bits for bits, _ in played] == on_host(seed, size)


@pytest.mark.long
@examples(8)
@given(
    seed=st.integers(0, 1 << 30),
    hosts=st.sampled_from([(0, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 0, 1, 1), (0, 1, 1, 0)]),
    fusion_bytes=st.sampled_from([0, 100, 1 << 20]),
)
def test_across_hosts_a_small_message_tells(seed: int, hosts: tuple[int, ...], fusion_bytes: int) -> None:
    """Shared memory within each host, and one rank of each between them."""
    size, settings = len(hosts), {"fusion_bytes": fusion_bytes}
    with PretendWorld(size, backend="shm+threads", hosts=hosts, settings=settings) as world:
        played = world.on_streams(partial(train, seed=seed, size=size), deadline_s=60)
    event(f"void {sum(stats['buckets_void'] for _, stats in played) > 0}")
    event(f"commits {sum(stats['commit_messages'] for _, stats in played) > 0}")
    assert [bits for bits, _ in played] == on_host(seed, size)


@examples(6)
@given(seed=st.integers(0, 1 << 30), size=st.integers(2, 3))
def test_what_hosts_tell_each_other_needs_no_other_rule(seed: int, size: int) -> None:
    """A commit message is right by itself, also on a rank that is frozen: the bits are those of negotiation all the same."""
    with pytest.MonkeyPatch.context() as patch:
        _whatever_the_freeze(patch)
        with PretendWorld(size, backend=COMMITTED[0], route=COMMITTED[1]) as world:
            played = world.on_streams(partial(train, seed=seed, size=size), deadline_s=60)
    assert [bits for bits, _ in played] == on_host(seed, size)


# --- the property bites: what it is to notice, when it is there


class Broken(PretendWorld):
    """A world that may hang when it ends: a device's queue waits for that of a rank whose device has failed."""

    def _end(self) -> None:
        for job in self.jobs:
            job.sets.abort()
        super()._end()


def _without_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceStream, "after", lambda self, buffers: None)


def _without_a_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PretendAdapter, "after", lambda self, event, tensors: None)


def _with_nothing_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceStream, "keep", lambda self, event, kept: None)


def _before_the_verdict(patch: pytest.MonkeyPatch) -> None:
    """Results go to the user's tensors as soon as they are queued, while the bucket may still be void."""
    original = DeviceExecutor._apart

    def hasty(self: DeviceExecutor, route: Any, one: Any, launch: Any, use: str) -> Later:
        later = original(self, route, one, launch, use)
        if launch.entries is None or use == "dummy":
            return later
        outcomes = later.deliver()
        return Later(later.event, lambda: outcomes)

    patch.setattr(DeviceExecutor, "_apart", hasty)


def _whatever_the_freeze(patch: pytest.MonkeyPatch) -> None:
    """What the hosts have told each other is handed over though this rank is frozen, where two rules forbid a false one."""
    original = Engine._settle

    def settle(self: Engine, launch: Any, deliver: Any) -> None:
        if not isinstance(deliver, Later):
            original(self, launch, deliver)
            return
        self._in_flight.add(launch, deliver)
        for valid, valid_deliver in self._in_flight.through(launch) if deliver.told else ():
            self._hand_over(valid, valid_deliver)

    patch.setattr(Engine, "_settle", settle)


def _a_dummy_says_it_is_real(patch: pytest.MonkeyPatch) -> None:
    """A rank that drains tells the others' hosts what it may not."""
    _whatever_the_freeze(patch)
    original = Commit.__call__
    patch.setattr(Commit, "__call__", lambda self, real: original(self, True))


def _nobody_listens(patch: pytest.MonkeyPatch) -> None:
    """A rank takes its own word for the others'."""
    _whatever_the_freeze(patch)
    original = Commit.__call__
    patch.setattr(Commit, "__call__", lambda self, real: original(self, real) or real)


@pytest.mark.parametrize(
    ("way", "mutate"),
    [
        (CONFIRMED, _without_events),
        (STAGED[0], _without_events),
        (CONFIRMED, _without_a_fence),
        (STAGED[0], _without_a_fence),
        (COMMITTED, _with_nothing_kept),
        (COMMITTED, _before_the_verdict),
        (BY_EVENT, _before_the_verdict),
        *long((COMMITTED, _a_dummy_says_it_is_real), (COMMITTED, _nobody_listens)),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "-".join(value),
)
def test_each_of_these_is_noticed(way: tuple[str, str], mutate: Callable[[pytest.MonkeyPatch], None]) -> None:
    """An engine or a handle that does not wait, memory that is let go, a result that comes too soon, a false word."""
    for seed in range(20):
        size = 2 + seed % 2
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                with Broken(size, backend=way[0], route=way[1]) as world:
                    played = world.on_streams(partial(train, seed=seed, size=size), deadline_s=5)
            except (
                DdlInternalError,
                DeadlinePassed,
            ):  # the pretend device has noticed it itself, or two ranks disagree
                return
        if [bits for bits, _ in played] != on_host(seed, size):
            return
    pytest.fail("no program of twenty has shown it")
