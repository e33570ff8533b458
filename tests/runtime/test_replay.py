"""Replay against what pure negotiation would give: random programs in worlds of threads, and each part by itself."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import ddlcore as ddl
from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator.replay_controller import KnownSchedule, ReplayController
from ddlcore.messages.coding import decode_spec, encode
from ddlcore.messages.spec import Spec
from ddlcore.process.job import Job
from ddlcore.runtime.periods import Occurrence, PeriodDetector, TensorKey
from ddlcore.testing import World
from ddlcore.types import DType, Kind
from tests.runtime.effort import examples

pytestmark = pytest.mark.timeout(600)

REPLAY = {"replay": True}
SPEC = encode(Spec(Kind.ALLREDUCE, DType.F32, (4,)))


def occurrence(name: str, bucket: int, stamp: int = -1) -> Occurrence:
    return Occurrence(TensorKey(0, name, SPEC), bucket, stamp)


@examples(200)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 1 << 30))
def test_a_period_is_found_whatever_its_order(tensors: int, before: int, seed: int) -> None:
    """After at most four periods, however shuffled, and whatever came before; it holds each tensor once."""
    rng = random.Random(seed)
    detector = PeriodDetector()
    bucket = 0
    for i in range(before):
        assert detector.observe(occurrence(f"once{i}", bucket)) is None
        bucket += 1
    names = [f"t{i}" for i in range(tensors)]
    found = None
    for _ in range(4):
        rng.shuffle(names)
        for name in names:
            found = detector.observe(occurrence(name, bucket)) or found
            bucket += 1
    assert found is not None
    assert Counter(one.key.name for one in found) == Counter(names)


@examples(100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 5))
def test_a_loop_without_names_is_found_by_its_sequence(loop: list[int], before: int) -> None:
    """Anonymous calls are known by their specs; the period divides the loop."""
    detector = PeriodDetector()
    specs = [encode(Spec(Kind.ALLREDUCE, DType.F32, (n,))) for n in range(4)]
    for i in range(before):
        detector.observe(Occurrence(TensorKey(0, "", specs[i % 3]), i, -1))
    found = None
    for turn in range(8 * len(loop)):
        found = found or detector.observe(Occurrence(TensorKey(0, "", specs[loop[turn % len(loop)]]), turn, -1))
    assert found is not None


def steps(detector: PeriodDetector, loop: list[tuple[str, int]], bucket: int, turns: int) -> list[list[str]]:
    """Plays ``turns`` of a loop of (name, buckets under way that the user has not seen end); the periods that are found."""
    found = []
    for _ in range(turns):
        for name, unseen in loop:
            period = detector.observe(occurrence(name, bucket, bucket - 1 - unseen))
            bucket += 1
            if period is not None:
                found.append([one.key.name for one in period])
    return found


STEP = [("a", 0), ("b", 1), ("c", 2)]  # asked for together: who asks for c has seen neither a nor b end


def test_a_period_does_not_begin_amid_tensors_that_are_under_way_together() -> None:
    """Watched from the middle of a step on, the period is still the step, not its end and the next one's beginning."""
    detector = PeriodDetector()
    detector.observe(occurrence("a", 0, -1))  # before the pause, and b and c are asked for before it ends
    detector.pause()
    for bucket, name in enumerate("bc", 1):
        assert detector.observe(occurrence(name, bucket, -1)) is None
    assert steps(detector, STEP, 3, 5)[0] == ["a", "b", "c"]


def test_metrics_and_evaluations_do_not_refute_a_period() -> None:
    """After two divergences eight clean steps are asked for; a metric after three and an evaluation after six do not matter."""
    detector = PeriodDetector()
    detector.divergence(0)
    detector.divergence(0)
    assert steps(detector, STEP, 0, 3) == []
    assert steps(detector, [("metric", 0)], 9, 1) == []
    assert steps(detector, STEP, 10, 3) == []
    assert steps(detector, [("evaluate", 0)], 19, 5) == []
    assert steps(detector, STEP, 24, 5) == [], "those beside which something else ran prove nothing either"
    assert steps(detector, STEP, 39, 1) == [["a", "b", "c"]]


def test_a_step_that_lacks_a_tensor_refutes_the_period() -> None:
    """Proof begins anew where a window holds a part of the period only."""
    detector = PeriodDetector(needed=4)
    assert steps(detector, STEP, 0, 4) == []
    assert steps(detector, STEP[:2], 12, 1) == []
    assert steps(detector, STEP, 14, 4) == []
    assert steps(detector, STEP, 26, 2)[0] == ["a", "b", "c"]


def test_a_schedule_goes_on_where_its_period_is_met_again() -> None:
    """Bucket by bucket: found anew from its second segment on, it begins there; cut otherwise, it is laid out anew."""
    detector = ReplayController(ThresholdFusion(), {"fusion_bytes": 1 << 20}, decode_spec, True)

    def found(*names: str) -> KnownSchedule:
        """Each name sees the one before it end."""
        known = None
        while known is None:
            for name in names:
                bucket = next(count)
                known = known or detector.decided([(TensorKey(0, name, SPEC), bucket, bucket - 1)], lambda i: True)[1]
        return known

    count = itertools.count()
    first = found("a", "b", "c")
    assert [planned.names for planned in first.arranged.buckets] == [("a",), ("b",), ("c",)]
    assert detector.resume(first, 1).start == 0
    detector.disturbed()
    again = found("b", "c", "a")
    assert again is first
    assert detector.resume(again, 2).start % 3 == 1, "a has just run"
    detector.disturbed()
    other = found("a", "c", "b")
    assert other is not first
    assert [planned.names for planned in other.arranged.buckets] == [("a",), ("c",), ("b",)]
    assert detector.resume(other, 3).start == 0


def test_a_schedule_that_held_for_long_needs_little_proof_again() -> None:
    """Each divergence doubles the proof, unless the periods in between were eight times as many."""
    detector = PeriodDetector()
    needed = []
    for held in (3, 31, 64, 40, 1000):
        detector.divergence(held)
        needed.append(detector.needed)
    assert needed == [4, 8, 2, 2, 2]


def test_a_step_in_two_may_ask_for_more() -> None:
    """A metric in each second step: the period is what comes each time."""
    detector = PeriodDetector()
    found = None
    for bucket, name in enumerate("ab abm ab abm ab abm ab".replace(" ", "")):
        found = detector.observe(occurrence(name, bucket)) or found
    assert found is not None
    assert [one.key.name for one in found] == ["a", "b"]


def test_a_sequence_without_names_costs_little_however_long() -> None:
    """Fifty thousand calls of two kinds that never repeat: what is looked at for each stays bounded."""
    rng = random.Random(1)
    detector = PeriodDetector(needed=64)
    specs = [encode(Spec(Kind.ALLREDUCE, DType.F32, (n,))) for n in range(2)]
    began_s = time.process_time()
    for i in range(50_000):
        detector.observe(Occurrence(TensorKey(0, "", specs[rng.randrange(2)]), i, -1))
    assert time.process_time() - began_s < 10


@st.composite
def programs(draw: st.DrawFn) -> dict[str, int]:
    return {
        "size": draw(st.integers(2, 4)),
        "seed": draw(st.integers(0, 1 << 30)),
        "steps": draw(st.integers(8, 30)),
        "tensors": draw(st.integers(1, 8)),
        "sets": draw(st.integers(0, 2)),
        "fusion_bytes": draw(st.sampled_from([0, 200, 1 << 20])),
    }


def play(job: Job, rank: int, shape: dict[str, int], meeting: threading.Barrier) -> tuple[int, int]:
    """One rank's random training loop: the same random choices on all ranks where they must agree, its own elsewhere."""
    common, own = random.Random(shape["seed"]), random.Random(shape["seed"] * 31 + rank)
    size = shape["size"]
    sets = [ddl.global_process_set]
    for _ in range(shape["sets"]):
        ranks = sorted(common.sample(range(size), common.randint(1, size)))
        if ranks not in [s.ranks for s in sets]:
            sets.append(ddl.add_process_set(ranks))
    tensors = []
    for i in range(shape["tensors"]):
        process_set = common.choice(sets)
        kind = common.choice(["sum"] * 5 + ["broadcast", "gather", "scatter"])
        tensors.append((f"t{i}", process_set, kind, common.randint(1, 40)))
    for step in range(shape["steps"]):
        kinds = common.random()
        missing = common.choice(tensors)[0] if common.random() < 0.1 else None  # an unused parameter
        extra = kinds < 0.15
        meet = common.random() < 0.2
        order = [t for t in tensors if rank in t[1].ranks and t[0] != missing]
        own.shuffle(order)
        _step(rank, order, step, own)
        if meet:
            meeting.wait(80)  # a meeting outside ddl
        if extra:
            assert ddl.allreduce(np.full(3, rank), op=ddl.Sum, name=f"metric{step % 3}")[0] == sum(range(size))
        if common.random() < 0.1:
            assert ddl.allreduce(np.full(5, 1.0), op=ddl.Sum)[0] == size  # without a name
    for step in range(own.randint(0, 3)):
        ddl.allreduce(np.ones(4), op=ddl.Sum, name=f"last{step}")
    ddl.join()
    return job.stats()["buckets_replayed"], job.stats()["divergences"]


def _step(rank: int, order: list[tuple[str, ddl.ProcessSet, str, int]], step: int, own: random.Random) -> None:
    handles = []
    for name, process_set, kind, count in order:
        x = np.full(count, step + rank, np.float64)
        if kind == "sum":
            handle = ddl.allreduce_async(x, name=name, op=ddl.Sum, process_set=process_set)
        elif kind == "broadcast":
            handle = ddl.broadcast_async(x, process_set.ranks[0], name=name, process_set=process_set)
        elif kind == "gather":
            handle = ddl.allgather_async(x[: 1 + (step + rank) % count], name=name, process_set=process_set)
        else:
            handle = ddl.reducescatter_async(x, name=name, op=ddl.Sum, process_set=process_set)
        handles.append((name, process_set, kind, count, handle))
    own.shuffle(handles)
    for name, process_set, kind, count, handle in handles:
        ranks = process_set.ranks
        total = sum(step + r for r in ranks)
        result = handle.wait()
        if kind == "sum" or kind == "scatter":
            expected = np.full(len(result), total, np.float64)
        elif kind == "broadcast":
            expected = np.full(count, step + ranks[0], np.float64)
        else:
            expected = np.concatenate(
                [np.full(min(count, 1 + (step + r) % count), step + r, np.float64) for r in ranks]
            )
        np.testing.assert_array_equal(result, expected, err_msg=f"{name} ({kind}) in step {step} on rank {rank}")


@examples(25)
@given(programs(), st.sampled_from(["threads", "shm"]))
def test_what_negotiation_finishes_replay_finishes_with_equal_values(shape: dict[str, int], backend: str) -> None:
    """Shuffled orders, several sets, unused parameters, metrics now and then, meetings outside, joins: no wrong value, no hang."""
    meeting = threading.Barrier(shape["size"])
    with World(
        shape["size"], backend=backend, settings={"fusion_bytes": shape["fusion_bytes"], "replay": True}
    ) as world:
        counts = world.run(lambda rank, job: play(job, rank, shape, meeting), deadline_s=20)
    event("some buckets were replayed" if max(replayed for replayed, _ in counts) else "all buckets were negotiated")


def test_steady_steps_send_nothing() -> None:
    """After warm-up, fifty steps of a training loop send and await 0 control messages."""

    def program(rank: int, job: Job) -> tuple[int, int]:
        own = random.Random(rank)
        counts = []
        for _ in range(60):
            names = list(range(20))
            own.shuffle(names)
            handles = [ddl.allreduce_async(np.full(50, float(i)), name=f"g{i}") for i in names]
            for handle in handles:
                handle.wait()
            counts.append(job.stats()["control_messages"])
        return counts[-1] - counts[9], job.stats()["buckets_replayed"]

    with World(3, settings=REPLAY) as world:
        for messages, replayed in world.run(program):
            assert messages == 0
            assert replayed >= 50


def test_waiting_for_half_a_bucket_leaves_and_goes_on() -> None:
    """A rank that waits for one tensor before it makes the next: replay is left, the values are right, it comes back."""

    def program(rank: int, job: Job) -> int:
        for step in range(40):
            if step < 10 or step > 14:
                handles = [ddl.allreduce_async(np.full(3, step + i), name=f"g{i}", op=ddl.Sum) for i in range(4)]
                for i, handle in enumerate(handles):
                    assert handle.wait()[0] == 2 * (step + i)
            else:
                for i in range(4):
                    assert ddl.allreduce(np.full(3, step + i), name=f"g{i}", op=ddl.Sum)[0] == 2 * (step + i)
        return job.stats()["divergences"]

    with World(2, settings=REPLAY) as world:
        assert max(world.run(program)) >= 1


def test_replay_can_be_turned_off() -> None:
    """With replay off every bucket is negotiated, and the values are the same bits."""

    def program(rank: int, job: Job) -> list[bytes]:
        rng = np.random.default_rng(rank)
        out = []
        for _ in range(12):
            xs = [rng.standard_normal(33).astype(np.float32) for _ in range(3)]
            handles = [ddl.allreduce_async(x, name=f"g{i}") for i, x in enumerate(xs)]
            out += [handle.wait().tobytes() for handle in handles]
        replayed.append(job.stats()["buckets_replayed"])
        return out

    results = []
    for replay in (True, False):
        replayed: list[int] = []
        with World(3, settings={"replay": replay}) as world:
            results.append(world.run(program))
        assert (min(replayed) > 0) is replay
    assert results[0] == results[1]


def test_a_mismatch_in_replay_is_told_to_every_rank() -> None:
    """One rank changes a shape: not a hang, but the table on both, and the loop goes on."""

    def program(rank: int, job: Job) -> None:
        for _ in range(20):
            ddl.allreduce(np.ones(4), name="a")
        with pytest.raises(ddl.MismatchError, match="shape"):
            ddl.allreduce(np.ones(4 + rank), name="a")
        for _ in range(20):
            assert ddl.allreduce(np.ones(4), op=ddl.Sum, name="b")[0] == 2

    with World(2, settings=REPLAY) as world:
        world.run(program)


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_anonymous_calls_may_run_ahead_of_their_period(backend: str) -> None:
    """Eight calls without names under way at once, paired by their order though ranks hesitate differently."""

    def program(rank: int, job: Job) -> None:
        own = random.Random(rank)
        for _ in range(30):
            ddl.allreduce(np.ones(4), op=ddl.Sum)
        for _ in range(15):
            handles = []
            for i in range(8):
                handles.append(ddl.allreduce_async(np.full(4, 100.0 * i + rank), op=ddl.Sum))
                if own.random() < 0.3:
                    time.sleep(0.001 * own.random())
            assert [handle.wait()[0] for handle in handles] == [200.0 * i + 1 for i in range(8)]

    with World(2, backend=backend, settings=REPLAY) as world:
        world.run(program)


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_joins_between_replayed_stretches(backend: str) -> None:
    """All kinds in a loop, a join now and then with uneven work: values right, nobody waits."""

    def program(rank: int, job: Job) -> None:
        for turn in range(6):
            for step in range(12 + (turn if rank == 0 else 0)):
                alone = step >= 12
                assert ddl.allreduce(np.full(4, 1.0), op=ddl.Sum, name="a")[0] == (1 if alone else 2)
                assert ddl.allgather(np.full(1 + rank, rank), name="g").size == (1 if alone else 3)
            ddl.join()

    with World(2, backend=backend, settings=REPLAY) as world:
        world.run(program)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32])
def test_replay_gives_the_same_bits(backend: str, dtype: type) -> None:
    """Averages and scales of large 16-bit values too: they are scaled before they are rounded."""

    def program(rank: int, job: Job) -> list[bytes]:
        x: np.ndarray[Any, Any] = np.full(7, 40000 if dtype is not np.int32 else 7, dtype)
        half = [ddl.allreduce(x, op=ddl.Sum, name="h", postscale_factor=0.25).tobytes() for _ in range(12)]
        return [*half, *(ddl.allreduce(x, name="x").tobytes() for _ in range(12))]

    results = []
    for replay in (True, False):
        with World(3, backend=backend, settings={"replay": replay}) as world:
            results += world.run(program)
    assert len({tuple(result) for result in results}) == 1
    assert len(set(results[0])) == 2


def test_a_rank_that_leaves_takes_its_schedules_with_it() -> None:
    """After shutdown of one, the others' calls that need it raise; those that do not go on."""

    def program(rank: int, job: Job) -> None:
        pair = ddl.add_process_set([0, 1])
        for _ in range(20):
            if rank < 2:
                ddl.allreduce(np.ones(4), name="p", process_set=pair)
            ddl.allreduce(np.ones(4), name="g")
        if rank == 2:
            ddl.shutdown()
            return
        for _ in range(10):
            assert ddl.allreduce(np.ones(4), op=ddl.Sum, name="p", process_set=pair)[0] == 2
        with pytest.raises(ddl.PeerLost):
            ddl.allreduce(np.ones(4), name="g")

    with World(3, settings=REPLAY) as world:
        world.run(program)


def test_a_rank_that_takes_its_time_costs_no_schedule() -> None:
    """One rank pauses for longer than the others trust; the schedule goes on where it was, and nothing is learned anew."""

    def run(rank: int, job: Job) -> tuple[int, int]:
        grown = 0
        for step in range(40):
            if step == 25:
                before = job.stats()["buckets_negotiated"]
                if rank == 0:
                    time.sleep(2.5)  # a checkpoint, say; the wait itself is what is tested
            first = ddl.allreduce_async(np.ones(3), name="first", op=ddl.Sum)
            rest = ddl.allreduce_async(np.full(5, step), name="rest", op=ddl.Sum)
            assert first.wait()[0] == 2
            assert rest.wait()[0] == 2 * step
        grown = job.stats()["buckets_negotiated"] - before
        return grown, job.stats()["divergences"]

    with World(2, settings={**REPLAY, "fusion_bytes": 0}) as world:
        told = world.run(run)
    assert sum(asked for _, asked in told) >= 1, "nobody suspected anything: the pause is too short to show anything"
    assert all(grown <= 2 for grown, _ in told), f"negotiated after the pause: {told}"
