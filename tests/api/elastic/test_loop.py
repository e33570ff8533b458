"""The elastic loop in worlds of threads: nobody is lost but the dead, no step is done twice, and all agree."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import ddlcore as ddl
from ddlcore.api.elastic import ObjectState, run
from ddlcore.api.elastic.loop import _mendable
from ddlcore.errors import Closed, DdlInternalError, DeadlineExceeded, HorovodInternalError, MismatchError
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


@pytest.mark.parametrize("evict_after_s", [0.0, 60.0])
def test_a_rank_that_hangs_while_it_enters_a_world_does_not_end_the_others(evict_after_s: float) -> None:
    """With ``--evict-after``, they form another world without it; otherwise the job ends, as nobody ends that rank."""
    error = DeadlineExceeded("init: rank 3 has not opened its transport within 60 s")
    job = cast(
        Job, SimpleNamespace(failed_with=lambda: None, settings=SimpleNamespace(number=lambda name: evict_after_s))
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
