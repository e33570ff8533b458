"""The coordinator and the ranks' tensor queues as machines: whatever negotiation finishes replay finishes, in any interleaving."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.types import DType, Kind
from tests.runtime.deeds import Call, Do, Meet, Order, Wait
from tests.runtime.effort import examples
from tests.runtime.machines import Machines
from tests.runtime.programs import JOIN, Loop, Tensor, beside, one_shot, random_loop, random_tensors

pytestmark = pytest.mark.timeout(600)

BYTES = [0, 32, 1 << 20]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    return Order(draw(st.integers(0, 1 << 30)), draw(st.sampled_from([0.0, 0.02, 0.3])), draw(st.booleans()))


def compare(loop: Loop, order: Order, fusion_bytes: int, depth: int) -> Machines:
    """Runs ``loop`` by negotiation alone and with replay; the same calls must end, the same fail, and none be left."""
    worlds = []
    for replay in (False, True):
        world = Machines(
            loop.sets, loop.programs, replay=replay, fusion_bytes=fusion_bytes, depth=depth, join_spec=JOIN
        )
        world.run(order)
        world.check_rest()
        worlds.append(world)
    negotiated, replayed = worlds
    assert replayed.done() == negotiated.done()
    assert replayed.failed() == negotiated.failed()
    assert negotiated.replayed() == 0
    event("some buckets were replayed" if replayed.replayed() else "all buckets were negotiated")
    event("users' threads have launched calls without a name" if replayed.unnamed() else "no user's thread has")
    event("it ends" if negotiated.has_ended() else "it cannot end")
    return replayed


@examples(120)
@given(st.integers(0, 1 << 30), orders())
def test_a_step_that_waits_as_it_pleases(seed: int, order: Order) -> None:
    """A schedule of one to three buckets, then a step that waits anywhere: overlapping sets, meetings, three in flight."""
    loop, depth = one_shot(random.Random(seed))
    compare(loop, order, 1 << 20, depth)


@examples(60)
@given(
    st.integers(0, 1 << 30), st.integers(2, 5), st.integers(8, 25), orders(), st.sampled_from(BYTES), st.integers(1, 3)
)
def test_loops_as_they_come(seed: int, size: int, steps: int, order: Order, fusion_bytes: int, depth: int) -> None:
    """Evaluation, metrics, unused and changed tensors, groups, pauses, joins, shuffled on each rank: all ends as negotiated."""
    compare(random_loop(random.Random(seed), size, steps, 6), order, fusion_bytes, depth)


@examples(40)
@given(st.integers(0, 1 << 30), st.integers(2, 3), orders(), st.sampled_from(BYTES))
def test_two_threads_on_each_rank(seed: int, size: int, order: Order, fusion_bytes: int) -> None:
    """Two loops that know nothing of each other, and share the schedule that comes of it: both end."""
    rng = random.Random(seed)
    sets = {0: tuple(range(size)), 1: (0, size - 1)}
    loops = []
    for prefix in "pq":
        loop = Loop(dict(sets), rng)
        tensors = [one for one in random_tensors(rng, sets, 3, prefix) if one.tensors[0][0]]
        for _ in range(rng.randint(5, 20)):
            loop.step(tensors if rng.random() < 0.9 else rng.sample(tensors, len(tensors) // 2), late=0.3)
        loop.finish()
        loops.append(loop)
    assert compare(beside(*loops), order, fusion_bytes, 1).has_ended()


def allreduces(prefix: str, count: int) -> list[Tensor]:
    spec = encode(Spec(Kind.ALLREDUCE, DType.F32, (4,)))
    return [Tensor(f"{prefix}{i}", 0, ((f"{prefix}{i}", spec),)) for i in range(count)]


TRAIN, EVALUATE, METRIC = allreduces("t", 12), allreduces("e", 3), allreduces("m", 1)
UNNAMED = encode(Spec(Kind.ALLREDUCE, DType.F32, (9,)))


def anonymous_first(loop: Loop, step: int) -> None:
    loop.step([Tensor(f"a{step}", 0, (("", UNNAMED),))], late=1.0)
    loop.step(TRAIN)


def unused_now_and_then(loop: Loop, step: int) -> None:
    loop.step(TRAIN if step % 50 else TRAIN[1:])


def metric_every(steps: int) -> Callable[[Loop, int], None]:
    def body(loop: Loop, step: int) -> None:
        loop.step(TRAIN)
        if step % steps == 0:
            loop.step(METRIC)

    return body


def evaluate_in_between(loop: Loop, step: int) -> None:
    loop.step(EVALUATE if step % 30 >= 25 else TRAIN)


def two_optimizers(loop: Loop, step: int) -> None:
    loop.step(TRAIN)
    loop.step(EVALUATE)


def random_subsets(loop: Loop, step: int) -> None:
    loop.step(TRAIN if loop.rng.random() < 0.8 else loop.rng.sample(TRAIN, 7))


@pytest.mark.parametrize(
    ("body", "most"),
    [
        pytest.param(metric_every(1000), 0.05, id="the same step"),
        pytest.param(anonymous_first, 0.05, id="a call without a name comes first"),
        pytest.param(two_optimizers, 0.05, id="two optimizers"),
        pytest.param(metric_every(10), 0.1, id="a metric in ten steps"),
        pytest.param(metric_every(2), 0.3, id="a metric in two steps"),
        pytest.param(evaluate_in_between, 0.15, id="evaluation in between"),
        pytest.param(unused_now_and_then, 0.2, id="a parameter is unused in one step of fifty"),
        pytest.param(random_subsets, 1.05, id="steps that differ at random"),
    ],
)
def test_what_replay_costs_in_messages(body: Callable[[Loop, int], None], most: float) -> None:
    """Control messages with replay, as a part of those without: few in a loop, hardly more where nothing repeats."""
    sent = []
    for replay in (False, True):
        loop = Loop({0: (0, 1, 2)}, random.Random(1))
        for step in range(150):
            body(loop, step)
        loop.finish()
        world = Machines(loop.sets, loop.programs, replay=replay)
        world.run(Order(7))
        assert world.has_ended()
        sent.append(sum(node.messages for node in world.nodes))
    assert sent[1] <= most * sent[0]


def test_what_was_seen_to_depend_never_shares_a_bucket_again() -> None:
    """A loop begins to wait for one tensor before it asks for the next: it is left once, and replayed apart from then on."""
    loop = Loop({0: (0, 1)}, random.Random(1))
    first, second = TRAIN[:1], TRAIN[1:2]
    for _ in range(10):
        loop.step([*first, *second])
    for _ in range(60):
        loop.step(first)
        loop.step(second)
    world = Machines(loop.sets, loop.programs)
    world.run(Order(3))
    assert world.has_ended()
    assert world.coordinator.replay_controller.divergences == 1
    assert world.nodes[0].replayed > 100


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_full_bucket_behind_a_collective_that_lacks_a_rank_is_watched(prioritized: bool) -> None:
    """The rank that is lacking waits, outside ddl, for that full bucket of a set that it is no member of."""
    a = allreduces("a", 1)
    c = [Tensor("c", 1, (("c", UNNAMED),))]
    for seed in range(30):
        loop = Loop({0: (0, 1, 2), 1: (0, 2)}, random.Random(seed))
        for _ in range(4):
            loop.step(a)
            loop.step(c)
        both: list[Do] = [Call("a", 0, a[0].tensors), Call("c", 1, c[0].tensors), Wait("c"), Meet("m", 3), Wait("a")]
        loop.programs[0][0] += both
        loop.programs[1][0] += [Meet("m", 3), Call("a", 0, a[0].tensors), Wait("a")]
        loop.programs[2][0] += both
        world = Machines(loop.sets, loop.programs)
        world.run(Order(seed, prioritized=prioritized))
        world.check_rest()
        assert world.has_ended()
        assert world.replayed() > 0


def test_users_threads_launch_calls_without_names_and_void_ones_are_made_again() -> None:
    """Some steps have a further call, so the ranks leave the schedule at different places."""
    launched = void = 0
    for seed in range(10):
        loop = Loop({0: (0, 1, 2)}, random.Random(seed))
        for step in range(80):
            loop.step([Tensor(f"a{step}", 0, (("", UNNAMED),))])
            loop.step(TRAIN)
            if step % 40 == 39:
                loop.step(METRIC)
        loop.finish()
        world = Machines(loop.sets, loop.programs)
        world.run(Order(seed, eager=0.0005))
        world.check_rest()
        assert world.has_ended()
        launched += world.unnamed()
        void += sum(node.void for node in world.nodes)
    assert launched > 200, launched
    assert void > 0, void
