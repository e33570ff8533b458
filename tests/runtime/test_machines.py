"""The coordinator and the ranks' inboxes as machines: whatever negotiation finishes replay finishes, in any interleaving."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.runtime.machines import Machines, Order
from tests.runtime.programs import JOIN, Loop, one_shot, random_loop

pytestmark = pytest.mark.timeout(240)

ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))
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
    event("some batches were replayed" if replayed.replayed() else "all batches were negotiated")
    event("it ends" if negotiated.has_ended() else "it cannot end")
    return replayed


@settings(ANY, max_examples=400)
@given(st.integers(0, 1 << 30), orders())
def test_a_step_that_waits_as_it_pleases(seed: int, order: Order) -> None:
    """A schedule of one to three batches, then a step that waits anywhere: overlapping sets, meetings, three in flight."""
    loop, depth = one_shot(random.Random(seed))
    compare(loop, order, 1 << 20, depth)


@settings(ANY, max_examples=120)
@given(
    st.integers(0, 1 << 30), st.integers(2, 5), st.integers(8, 25), orders(), st.sampled_from(BYTES), st.integers(1, 3)
)
def test_loops_as_they_come(seed: int, size: int, steps: int, order: Order, fusion_bytes: int, depth: int) -> None:
    """Evaluation, metrics, unused and changed tensors, groups, pauses, joins, shuffled on each rank: all ends as negotiated."""
    compare(random_loop(random.Random(seed), size, steps, 6), order, fusion_bytes, depth)
