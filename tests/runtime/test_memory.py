"""The coordinator remembers no more after five thousand steps than after fifteen hundred, whatever the steps are."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from ddlcore.builtin.fusion import ThresholdFusion
from ddlcore.coordinator import request_table
from ddlcore.coordinator.coordinator import Coordinator
from ddlcore.messages.coding import encode
from ddlcore.messages.ranks import WorldRank
from ddlcore.messages.spec import Ask, Spec
from ddlcore.messages.to_coordinator import Frozen, Leave, Request
from ddlcore.messages.to_rank import Answer, Arranged, Drain, Freeze, Outgoing, Resume
from ddlcore.runtime import periods, repetitions
from ddlcore.runtime.schedule import MOST_KNOWN
from ddlcore.types import DType, Kind
from tests.tiers import long

SIZE = 2
STEPS, WARM_STEPS = 5_000, 1_500
GROWTH_BYTES = 16 << 10  # far less than a name a step would take


@functools.lru_cache(64)  # bounded, as all that is counted here must be
def spec(*shape: int) -> bytes:
    return encode(Spec(Kind.ALLREDUCE, DType.F32, shape))


class Loop:
    """Ranks that ask alike, in discovery and beside replay; nothing of theirs is remembered here."""

    def __init__(self, replay: bool) -> None:
        self.one = Coordinator(SIZE, ThresholdFusion(), 1 << 20, replay)
        self.place = 0  # the last that all ranks launched
        self.freezes = 0

    def step(self, asks: tuple[Ask, ...]) -> None:
        epoch = self.one.epoch
        for rank in range(SIZE):
            self._hear(self.one.handle(WorldRank(rank), Request(epoch, 1, asks)))

    def leave(self) -> None:
        self._hear(self.one.handle(WorldRank(0), Leave(self.one.epoch, "a test says so")))

    def _hear(self, outgoing: Outgoing[WorldRank]) -> None:
        if any(isinstance(message, Freeze) for _, message in outgoing):
            self.freezes += 1
            self.place += 1000
            epoch = self.one.epoch
            for rank in range(SIZE):
                told = self.one.handle(WorldRank(rank), Frozen(epoch, ((0, self.place),)))
            assert isinstance(told[0][1], Drain)


def one_period(loop: Loop) -> Iterator[None]:
    """The same names in every step, negotiated for ever."""
    while True:
        loop.step(tuple(Ask(0, f"layer{i}", spec(i)) for i in range(2)))
        yield


def new_names(loop: Loop) -> Iterator[None]:
    """Names that never come again."""
    for step in itertools.count():
        loop.step(tuple(Ask(0, f"step{step}.{i}", spec(i)) for i in range(2)))
        yield


def new_shapes(loop: Loop) -> Iterator[None]:
    """One name, whose shape never comes again."""
    for step in itertools.count():
        loop.step((Ask(0, "x", spec(step)),))
        yield


def no_names(loop: Loop) -> Iterator[None]:
    """Calls without names in no order at all."""
    rng = random.Random(0)
    for step in itertools.count():
        loop.step((Ask(0, f"noname.0.{step}", spec(rng.randrange(1000))),))
        yield


def new_schedules(loop: Loop) -> Iterator[None]:
    """Periods that are learned, replayed, left, and never come again."""
    for number in itertools.count():
        before = loop.one.epoch
        while loop.one.epoch == before:
            loop.step(tuple(Ask(0, f"model{number}.{i}", spec(i)) for i in range(2)))
            yield
        loop.leave()


def new_insertions(loop: Loop) -> Iterator[None]:
    """A replay into which something is inserted that has another name each time."""
    while loop.one.replay_controller.replaying is None:
        loop.step((Ask(0, "x", spec()),))
    for number in itertools.count():
        loop.step((Ask(0, f"metric{number}", spec()),))
        assert loop.one.replay_controller.replaying is not None
        yield


@pytest.mark.parametrize(
    ("steps", "replay"),
    [
        (new_names, True),
        *long((one_period, False), (new_shapes, True), (no_names, True), (new_schedules, True), (new_insertions, True)),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_memory_stands_still(
    steps: Callable[[Loop], Iterator[None]], replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tracemalloc counts after warming up does not grow; the bounds are small here, so that all are reached."""
    monkeypatch.setattr(repetitions, "HISTORY", 256)
    monkeypatch.setattr(periods, "LONGEST", 256)
    monkeypatch.setattr(request_table, "MOST_SPECS", 256)
    loop = Loop(replay)
    running = steps(loop)
    sizes = []
    tracemalloc.start()
    try:
        for step in range(STEPS):
            next(running)
            if step >= WARM_STEPS and step % 500 == 0:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[1])  # the most since the last look
                tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    half = len(sizes) // 2
    assert max(sizes[half:]) < 1.05 * max(sizes[:half]) + GROWTH_BYTES, sizes
    if steps is new_insertions:
        assert loop.freezes == STEPS
    elif steps is new_schedules:
        assert loop.freezes > 32, "more schedules than are remembered"


class Listener(Loop):
    """A loop whose ranks launch nothing, and remember schedules as a tensor queue does."""

    def __init__(self) -> None:
        super().__init__(True)
        self.schedules: dict[int, None] = {}
        self.resumed = 0
        self.after: tuple[tuple[int, int], ...] = ()

    def _hear(self, outgoing: Outgoing[WorldRank]) -> None:
        for rank, message in outgoing:
            items = message.items if isinstance(message, (Answer, Drain)) else ()
            for item in items if rank == 0 else ():
                if isinstance(item, Arranged):
                    self.schedules[item.schedule] = None
                elif isinstance(item, Resume):
                    self.resumed += 1
                    self.after = item.after
                    del self.schedules[item.schedule]  # raises KeyError if it was forgotten
                    self.schedules[item.schedule] = None
                    while len(self.schedules) > MOST_KNOWN:
                        del self.schedules[next(iter(self.schedules))]
        if any(isinstance(message, Freeze) for _, message in outgoing):
            epoch = self.one.epoch
            for rank in map(WorldRank, range(SIZE)):
                said = self.one.handle(rank, Frozen(epoch, self.after or ((0, -1),)))
            self._hear(said)


def test_a_rank_still_has_every_schedule_that_is_resumed() -> None:
    """Both forget the longest unused; a schedule that the coordinator has forgotten is learned and told anew."""
    rng = random.Random(0)
    listener = Listener()
    models = [tuple(Ask(0, f"model{n}.{i}", spec(i)) for i in range(2)) for n in range(2 * MOST_KNOWN)]
    for turn in range(600):
        model = models[rng.randrange(len(models) if turn % 2 else 4)]
        while listener.one.replay_controller.replaying is None:
            listener.step(model)
        before = listener.one.epoch
        listener.step((Ask(0, f"other{turn}", spec()),))  # inserted, and nothing was launched: discovery again
        assert listener.one.epoch > before
        assert listener.one.replay_controller.replaying is None
    assert listener.resumed >= 600
    assert len(listener.schedules) == MOST_KNOWN
