"""Settings change while a loop is replayed: at a period's end, on all ranks at the same bucket, and no value is ever wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from ddlcore.coordinator.tuning import MOST_DISCARDED
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.types import DType, Kind, Value
from tests.runtime.deeds import Order
from tests.runtime.effort import examples
from tests.runtime.machines import Machines
from tests.runtime.programs import JOIN, Loop, Tensor, one_shot, random_loop

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Stretch:
    """A trial."""

    values: Mapping[str, Value]
    periods: int


@dataclass
class Whim:
    """A search driver that changes everything at random, ``changes`` times; then it lets be."""

    rng: random.Random
    changes: int
    least: int = 1
    most: int = 4
    given: Mapping[str, Value] = field(default_factory=lambda: {"chunk_bytes": 1})
    reopens: frozenset[str] = frozenset({"chunk_bytes"})
    over: list[Sequence[Sequence[int]]] = field(default_factory=list)
    trial_periods: list[int] = field(default_factory=list)
    asked: list[Stretch] = field(default_factory=list)
    broken: int = 0
    why: str = ""

    def trial(self, nbytes: int) -> Stretch:
        assert nbytes > 0
        self.changes -= 1
        values: dict[str, Value] = {
            "fusion_bytes": self.rng.choice([0, 16, 48, 1 << 20]),
            "first_bucket_bytes": self.rng.choice([0, 16]),
            "overlap": self.rng.choice(["on", "off"]),
            "chunk_bytes": self.rng.choice([1, 2, 3]),
        }
        over = self.changes < 0 or bool(self.why)
        self.asked.append(Stretch(values, 0 if over else self.rng.randint(self.least, self.most)))
        return self.asked[-1]

    def trial_over(self, periods_ns: Sequence[Sequence[int]]) -> None:
        self.over.append(periods_ns)
        self.trial_periods.append(self.asked[-1].periods)

    def trial_discarded(self) -> None:
        self.broken += 1

    def gave_up(self, why: str) -> None:
        self.why = why


@st.composite
def orders(draw: st.DrawFn) -> Order:
    return Order(draw(st.integers(0, 1 << 30)), draw(st.sampled_from([0.0, 0.02, 0.3])), draw(st.booleans()))


def compare(loop: Loop, order: Order, depth: int, driver: Whim) -> Machines:
    """Whatever ends by negotiation alone ends while everything is changed, and all ranks see the same changes."""
    negotiated = Machines(loop.sets, loop.programs, replay=False, depth=depth, join_spec=JOIN)
    tuned = Machines(loop.sets, loop.programs, depth=depth, join_spec=JOIN, driver=driver)
    for world in (negotiated, tuned):
        world.run(order)
        world.check_rest()
    assert tuned.done() == negotiated.done()
    assert tuned.failed() == negotiated.failed()
    for node in tuned.nodes:
        if not node.parted:
            assert node.adjusted == tuned.nodes[0].adjusted or tuned.nodes[0].parted
    for periods, flight in zip(driver.trial_periods, driver.over):
        assert {len(row) for row in flight} == {periods - 1}  # the first is not timed
    event(f"{min(len(driver.over), 5)} trials or more were run")
    return tuned


@examples(150)
@example(seed=721101918, order=Order(1), changes=1)  # a full bucket stands behind a collective that lacks a rank
@given(st.integers(0, 1 << 30), orders(), st.integers(1, 12))
def test_a_step_that_waits_as_it_pleases(seed: int, order: Order, changes: int) -> None:
    """A schedule of one to three buckets, then a step that waits anywhere: overlapping sets, meetings, three in flight."""
    loop, depth = one_shot(random.Random(seed))
    compare(loop, order, depth, Whim(random.Random(seed), changes))


@examples(120)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(8, 25), orders(), st.integers(1, 3), st.integers(1, 20))
def test_loops_as_they_come(seed: int, size: int, steps: int, order: Order, depth: int, changes: int) -> None:
    """Evaluation, metrics, unused and changed tensors, groups, pauses, joins, shuffled on each rank: all ends as negotiated."""
    loop = random_loop(random.Random(seed), size, steps, 6)
    compare(loop, order, depth, Whim(random.Random(seed), changes))


def tensors(count: int) -> list[Tensor]:
    spec = encode(Spec(Kind.ALLREDUCE, DType.F32, (4,)))
    return [Tensor(f"t{i}", 0, ((f"t{i}", spec),)) for i in range(count)]


def steady(steps: int, size: int = 3) -> Loop:
    loop = Loop({0: tuple(range(size))}, random.Random(1))
    for _ in range(steps):
        loop.step(tensors(8))
    loop.finish()
    return loop


@pytest.mark.long
@examples(30)
@given(st.integers(0, 1 << 30), st.booleans())
def test_a_steady_loop_is_never_left(seed: int, prioritized: bool) -> None:
    """Changes cost no void bucket, no divergence and no freeze; the last one is followed by silence."""
    driver = Whim(random.Random(seed), changes=10)
    world = Machines(steady(80).sets, steady(80).programs, driver=driver)
    world.run(Order(seed, prioritized=prioritized))
    world.check_rest()
    assert world.has_ended()
    assert len(driver.over) == 10 and driver.broken == 0
    assert world.coordinator.replay_controller.divergences == 0
    assert sum(node.void for node in world.nodes) == 0
    assert driver.asked[-1].periods == 0


def test_nothing_is_said_between_two_legs() -> None:
    """A trial costs each rank one message to the coordinator and one back, however many periods it has."""
    sent = []
    for most in (1, 8):
        driver = Whim(random.Random(3), changes=4, least=most, most=most)
        world = Machines(steady(60).sets, steady(60).programs, driver=driver)
        world.run(Order(5))
        assert len(driver.over) == 4
        sent.append(sum(node.messages for node in world.nodes))
    assert sent[0] == sent[1]


def test_a_loop_that_does_not_hold_still_is_given_up() -> None:
    """Trials that are left in the middle time after time end the search, and the loop goes on."""
    loop = Loop({0: (0, 1)}, random.Random(1))
    spec = encode(Spec(Kind.ALLREDUCE, DType.F32, (1,)))
    for step in range(200):
        loop.step(tensors(4))
        if step % 7 == 0:  # a metric: one freeze, and no divergence
            loop.step([Tensor("metric", 0, (("metric", spec),))])
    loop.finish()
    driver = Whim(random.Random(1), changes=1000, least=40, most=40)  # longer than it ever holds still
    world = Machines(loop.sets, loop.programs, driver=driver)
    world.run(Order(9))
    assert world.has_ended()
    assert driver.broken >= MOST_DISCARDED
    assert "too often" in driver.why
