"""The elastic loop in worlds of threads: nobody is lost but the dead, no step is done twice, and all agree."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run
from ddlcore.api.elastic.loop import _mendable
from ddlcore.errors import Closed, DdlInternalError, DeadlineExceeded, HorovodInternalError, MismatchError, PeerLost
from ddlcore.process.job import Job
from tests.api.elastic.threads import ElasticThreads, Killed

STEPS = 40


def trained(death: Callable[[int, int], bool], again: bool = False, steps: int = STEPS) -> Callable[[int], Any]:
    """Return what a thread does: ``steps`` steps, in each of which the total grows by the step's number.

    ``death(place, step)``: whether the thread dies there; ``again``: another one is started in its place then.
    """

    def play(place: int) -> Any:
        state = ObjectState(total=0.0, log=[])

        @run
        def train(state: Any) -> tuple[float, list[int], int]:
            while state.steps < steps:
                step = state.steps
                if death(place, step):
                    raise Killed(again)
                mean = ddl.allreduce(np.full(3, float(step)), name="step", op=ddl.Average)
                assert mean.tolist() == [step] * 3
                state.total += float(mean[0])
                state.log.append(step)
                state.commit()
            return state.total, list(state.log), ddl.size()

        return train(state)

    return play


def check(results: dict[int, Any], sizes: set[int] | None = None, steps: int = STEPS) -> None:
    for place, result in results.items():
        assert not isinstance(result, BaseException), (place, result)
        total, log, size = result
        assert log == list(range(steps)) and total == sum(range(steps)), place
        assert sizes is None or size in sizes, (place, size)


def test_nothing_happens() -> None:
    world = ElasticThreads(3, trained(lambda place, step: False))
    results = world.play()
    check(results, {3})
    assert len(results) == 3 and world.membership is not None and world.membership.world.generation == 1


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo", "shm+gloo"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_go_on(backend: str, victim: int) -> None:
    hosts = (0, 0, 1, 1) if backend == "shm+gloo" else (0, 0, 0, 0)
    death = lambda place, step: place == victim and step == 7  # noqa: E731
    world = ElasticThreads(4, trained(death), backend=backend, hosts=hosts)
    results = world.play()
    check(results, {3})
    assert sorted(results) == sorted({0, 1, 2, 3} - {victim}) and world.deaths == 1


@pytest.mark.parametrize("seed", range(12))
def test_at_random(seed: int) -> None:
    """Threads die at any step, in any number but not all, and come again while the others train."""
    size = 2 + seed % 3
    chance = random.Random(seed)
    deaths = {(place, step) for place in range(size) for step in range(60) if chance.random() < 0.04}
    done: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def death(place: int, step: int) -> bool:
        with lock:
            if (place, step) not in deaths or (place, step) in done or world.membership is None:
                return False
            if len(world.membership.world.members) < 2 or place == min(world.membership.world.members):
                return False  # somebody must be left who has the state
            done.add((place, step))
            return True

    world = ElasticThreads(size, trained(death, True, 60))
    results = world.play()
    check({place: result for place, result in results.items() if not isinstance(result, SystemExit)}, steps=60)
    assert any(not isinstance(result, SystemExit) for result in results.values())


def test_the_interrupted_step_is_told() -> None:
    """It is the one in flight: the survivors have completed what the dead thread has completed, or compute that again.

    No step is told if they hear of the death between two steps.
    """
    world = ElasticThreads(3, trained(lambda place, step: place == 1 and step == 7))
    check(world.play(), {2})
    (line,) = world.said
    assert re.match(
        r"world 2: rank 1 died \(SIGKILL\); 2 ranks go on(; step [78] is computed again| after step [78]); they stood still for [0-9.]+ s$",
        line,
    )


def test_nothing_is_computed_again_after_a_loss_between_two_steps() -> None:
    """A loop that notices it in ``commit()`` has nothing in flight."""
    together = threading.Barrier(3)

    def play(place: int) -> None:
        calls: list[int] = []

        @run
        def train(state: Any) -> None:
            calls.append(1)
            if len(calls) > 1:
                return
            ddl.barrier()
            together.wait(30.0)
            if place == 1:
                raise Killed
            while True:
                state.commit()

        train(ObjectState())

    world = ElasticThreads(3, play)
    assert world.play() == {0: None, 2: None}
    assert re.match(r"world 2: rank 1 died \(SIGKILL\); 2 ranks go on after step \d+; they stood still ", world.said[0])


def test_too_few_are_left() -> None:
    death = lambda place, step: place > 0 and step == 3  # noqa: E731
    world = ElasticThreads(3, trained(death), least=2, elastic_timeout_s=0.5)
    error = world.play()[0]
    assert isinstance(error, DdlInternalError), error
    assert "1 of at least 2 ranks are there (--min-np), and no others came within 0.5 s" in str(error)


def test_all_that_had_the_state_have_died() -> None:
    together = threading.Barrier(2)  # otherwise the first could be back, and have the state, before the second dies

    def death(place: int, step: int) -> bool:
        if step < 5 or world.deaths:
            return False
        together.wait(30.0)
        return True

    world = ElasticThreads(2, trained(death, again=True))
    for error in world.play().values():
        assert isinstance(error, DdlInternalError), error
        assert "all ranks that had the state of the training have ended" in str(error)


@pytest.mark.parametrize("error", [Closed("x"), MismatchError("x"), ValueError("x"), ddl.errors.InvalidArgument("x")])
def test_errors_that_would_come_again_leave_the_loop(error: Exception) -> None:
    def play(place: int) -> None:
        @run
        def train(state: Any) -> None:
            raise error

        train(ObjectState())

    assert all(result is error for result in ElasticThreads(2, play).play().values())


@pytest.mark.parametrize("waits", ["for an operation", "in commit", "for nothing"])
@pytest.mark.parametrize("error", [ValueError("rank 1 fails"), SystemExit(3)])
def test_others_go_on_after_an_error_of_one_rank(error: BaseException, waits: str) -> None:
    """They do so although a framework has wrapped their own errors, wherever they were when they heard of it."""
    left = threading.Event()

    def wrapped(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception:
            raise KeyError("a graph has failed") from None

    def play(place: int) -> int:
        state = ObjectState(count=0)

        @run
        def train(state: Any) -> int:
            while state.count < 8:
                if state.count == 4 and place == 1:
                    raise error
                if state.count == 4 and ddl.size() == 3 and waits == "in commit":
                    wrapped(lambda: [state.commit() for _ in range(1000) if not left.wait(0.01)])
                if state.count == 4 and ddl.size() == 3 and waits == "for nothing":
                    left.wait(30.0)
                wrapped(lambda: ddl.allreduce(np.ones(1), name="x"))
                state.count += 1
                state.commit()
            return ddl.size()

        try:
            return int(train(state))
        finally:
            if place == 1:
                left.set()

    assert ElasticThreads(3, play).play() == {0: 2, 1: error, 2: 2}


@pytest.mark.parametrize("error", [ValueError("once"), KeyboardInterrupt()])
def test_a_script_that_catches_its_error_may_ask_for_its_rank(error: BaseException) -> None:
    """It may want to save a checkpoint on rank 0. Its collectives say that it has left the job."""

    def play(place: int) -> tuple[int, int]:
        @run
        def train(state: Any) -> tuple[int, int]:
            ddl.barrier()
            if place == 1 and ddl.size() == 3:
                raise error
            ddl.allreduce(np.ones(1), name="x")
            return ddl.rank(), ddl.size()

        try:
            return train(ObjectState())
        except (ValueError, KeyboardInterrupt):
            with pytest.raises(DdlInternalError, match="this rank has left the job, because it has raised"):
                ddl.allreduce(np.ones(1), name="y")
            return ddl.rank(), ddl.size()

    results = ElasticThreads(3, play).play()
    assert results[1] == (1, 3) and sorted([results[0], results[2]]) == [(0, 2), (1, 2)]


def test_an_error_of_ones_own_is_raised_although_another_rank_has_raised_it_before() -> None:
    """All ranks have the same fault. The last one raises it in the first world, too, instead of entering a second one."""
    raised = threading.Barrier(2)
    worlds: list[int] = []

    def play(place: int) -> None:
        @run
        def train(state: Any) -> None:
            worlds.append(place)
            ddl.barrier()
            if place == 1:
                raised.wait(30.0)
                time.sleep(0.3)  # until the loss of rank 0 has come here
            raise ValueError(f"a fault on rank {place}")

        try:
            train(ObjectState())
        finally:
            if place == 0:
                raised.wait(30.0)

    results = ElasticThreads(2, play).play()
    assert [str(results[place]) for place in (0, 1)] == ["a fault on rank 0", "a fault on rank 1"]
    assert sorted(worlds) == [0, 1]


def test_a_rank_that_exits_as_it_should_does_not_disturb_the_others() -> None:
    """All agree to end. A slow one may still be in the last ``commit``, and ends as they do."""
    left = threading.Event()

    def play(place: int) -> None:
        @run
        def train(state: Any) -> None:
            ddl.barrier()
            if place == 1:
                left.wait(30.0)
                time.sleep(0.2)
            state.commit()
            raise SystemExit(0)

        try:
            train(ObjectState())
        finally:
            left.set()

    results = ElasticThreads(2, play).play()
    assert [type(result) for result in results.values()] == [SystemExit] * 2


def test_a_training_that_is_called_again_begins_where_the_others_do() -> None:
    """What a rank has changed since its last commit is gone, if it catches its error and calls the function again."""

    def play(place: int) -> list[float]:
        state = ObjectState(value=0.0)
        calls: list[int] = []

        @run
        def train(state: Any) -> float:
            calls.append(1)
            while state.steps < 6:
                ddl.allreduce(np.ones(1), name="x")
                state.value += 1.0
                if state.steps == 2 and place == 1 and len(calls) == 1:
                    state.value += 100.0
                    raise ValueError("once")
                state.commit()
            return float(state.value)

        try:
            return [train(state)]
        except ValueError:
            assert state.value == 103.0, "the script may look at what was there"
            return [train(state)]

    assert ElasticThreads(2, play).play() == {0: [6.0], 1: [6.0]}


@pytest.mark.parametrize(
    ("reason", "is_shown", "goes_on"),
    [
        ("raised ValueError: x", False, False),
        ("raised ValueError: x", True, True),
        ("raised KeyError: x", False, True),
        ("killed by signal 9 (SIGKILL)", False, True),
    ],
)
def test_whose_error_it_is(reason: str, is_shown: bool, goes_on: bool) -> None:
    """It is the function's own if another rank has raised one of the same type, and this one has not seen the loss."""
    lost = PeerLost((1,), reason)
    job = cast(Job, SimpleNamespace(failed_with=lambda: lost, has_shown_failure=lambda: is_shown, settings={}))
    settings = SimpleNamespace(number=lambda name: 0.0)
    job.settings = settings  # type: ignore[assignment]
    assert _mendable(ValueError("x"), job) is (lost if goes_on else None)


@pytest.mark.parametrize("evict_after_s", [0.0, 60.0])
def test_a_rank_that_hangs_while_it_enters_a_world_does_not_end_the_others(evict_after_s: float) -> None:
    """With ``--evict-after``, they form another world without it; otherwise the job ends, as nobody ends that rank."""
    error = DeadlineExceeded("init: rank 3 has not opened its transport within 60 s")
    job = cast(
        Job,
        SimpleNamespace(
            failed_with=lambda: None,
            has_shown_failure=lambda: False,
            settings=SimpleNamespace(number=lambda name: evict_after_s),
        ),
    )
    assert _mendable(error, job, True) is (error if evict_after_s else None)
    assert _mendable(error, job, False) is None, "a deadline of the script's own"


def test_a_script_may_ask_for_a_new_world() -> None:
    """As Horovod's scripts do: by raising HorovodInternalError."""

    def play(place: int) -> int:
        calls: list[int] = []

        @run
        def train(state: Any) -> int:
            calls.append(1)
            ddl.allreduce(np.ones(1), name="x")
            if place == 1 and len(calls) < 3:
                raise HorovodInternalError("once more")
            ddl.allreduce(np.ones(1), name="y")
            return len(calls)

        return int(train(ObjectState()))

    assert ElasticThreads(2, play).play() == {0: 3, 1: 3}


def test_collectives_before_the_first_world_are_refused_by_name() -> None:
    def play(place: int) -> tuple[int, int, int]:
        with pytest.raises(ValueError, match=r"its ranks meet where the function that elastic.run decorates begins"):
            ddl.allreduce(np.ones(1), name="x")
        return ddl.rank(), ddl.size(), ddl.local_rank()

    assert ElasticThreads(2, play).play() == {0: (0, 2, 0), 1: (1, 2, 1)}


def test_callbacks_learn_the_sizes() -> None:
    def play(place: int) -> list[Any]:
        told: list[Any] = []
        state = ObjectState()
        state.register_reset_callbacks([lambda: told.append("none"), lambda old, new: told.append((old, new))])

        @run
        def train(state: Any) -> None:
            ddl.barrier()
            if place == 2 and ddl.size() == 3:
                raise Killed
            ddl.allreduce(np.ones(1), name="x")

        train(state)
        return told

    assert ElasticThreads(3, play).play() == {0: ["none", (3, 2)], 1: ["none", (3, 2)]}


def test_without_an_elastic_job_the_function_is_called_once() -> None:
    def play(rank: int, job: Any) -> tuple[int, int]:
        state = ObjectState(x=rank + 5)

        @run
        def train(state: Any, more: int) -> tuple[int, int]:
            state.commit()
            return state.x, more

        return train(state, more=3)

    from ddl_conform.world import run_world

    assert run_world(2, play) == [(5, 3), (5, 3)]
