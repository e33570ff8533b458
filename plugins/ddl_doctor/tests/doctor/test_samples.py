"""Which share of a step is input: found from stacks alone, for generators, iterators, loaders and callables."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ddl_doctor.doctor.samples import Stacks
from ddl_doctor.reports import Profile

STEPS = 12


class Probe:
    """Takes a sample wherever it is called, as if the thread stood there; ``step`` counts one on."""

    def __init__(self, loaders: tuple[str, ...] = ()) -> None:
        self.stacks = Stacks(loaders)
        self.steps = 0

    def stand(self, seconds: float) -> None:
        self.stacks.take(sys._getframe(1), self.steps, seconds)

    def train(self) -> None:
        """Something of ours, where a step ends."""
        code = "def wait(probe):\n    probe.stand(0.004)\n    probe.steps += 1\n    probe.stand(0.001)\n"
        module = types.ModuleType("ddl_pretended")
        exec(code, vars(module))
        vars(module)["wait"](self)


def from_generator(probe: Probe) -> Iterator[int]:
    for number in range(STEPS):
        probe.stand(0.005)
        yield number


class FromNext:
    def __init__(self, probe: Probe) -> None:
        self._numbers = from_generator(probe)

    def __iter__(self) -> FromNext:
        return self

    def __next__(self) -> int:
        return next(self._numbers)


def from_calls(probe: Probe) -> Iterator[int]:
    """An iterator that no Python code stands in but what it calls."""
    numbers = iter(range(STEPS + 1))

    def call() -> int:
        probe.stand(0.005)
        return next(numbers)

    return iter(call, STEPS)


def by_for(probe: Probe, data: Any) -> None:
    for _ in data:
        helper(probe)
        probe.train()


def by_next(probe: Probe, data: Any) -> None:
    left = iter(data)
    for _ in range(STEPS):
        next(left)
        helper(probe)
        probe.train()


def helper(probe: Probe) -> None:
    """What computes, with loops and generators of its own; and a frame that does not last."""
    for _ in range(2):
        probe.stand(0.002)
    sum(value for value in inner(probe))


def inner(probe: Probe) -> Iterator[int]:
    probe.stand(0.001)
    yield 1


def epochs(probe: Probe, loop: Callable[[Probe, Any], None], make: Callable[[Probe], Any]) -> Profile:
    for _ in range(2):
        loop(probe, make(probe))
    return probe.stacks.profile()


@pytest.mark.parametrize("loop", [by_for, by_next])
@pytest.mark.parametrize("make", [from_generator, FromNext])
def test_a_third_of_a_step(loop: Callable[[Probe, Any], None], make: Callable[[Probe], Any]) -> None:
    """5 of 15 ms, however the loop comes by its data; the rest is not input, though it iterates too."""
    probe = Probe()
    profile = epochs(probe, loop, make)
    assert profile.loop == f"{loop.__name__} in test_samples.py"
    assert profile.input_s / profile.seconds == pytest.approx(1 / 3, abs=0.02)
    assert profile.seconds / profile.steps == pytest.approx(0.015, abs=0.001)
    assert sum(seconds for _, _, seconds, _ in profile.lines) == pytest.approx(profile.seconds)
    places = {text: input_s for _, text, _, input_s in profile.lines}
    assert places["probe.train()"] == 0 and places["helper(probe)"] == 0


def test_an_iterator_of_c() -> None:
    """No frame of a generator's stands there; the instruction of the loop tells."""
    profile = epochs(Probe(), by_for, from_calls)
    assert profile.input_s / profile.seconds == pytest.approx(1 / 3, abs=0.03)


def test_a_framework_s_loader() -> None:
    """Known by its module, wherever beneath the loop it is called."""
    module = types.ModuleType("pretended.loader.workers")
    exec("def fetch(probe):\n    probe.stand(0.005)\n", vars(module))

    def read(probe: Probe) -> None:
        vars(module)["fetch"](probe)

    def loop(probe: Probe, data: Any) -> None:
        for _ in data:
            read(probe)
            helper(probe)
            probe.train()

    for loaders, share in ((("pretended.loader",), 1 / 3), ((), 0.0)):
        profile = epochs(Probe(loaders), loop, lambda probe: range(STEPS))
        assert profile.input_s / profile.seconds == pytest.approx(share, abs=0.02)


def test_a_loop_that_is_a_generator_itself() -> None:
    """Whoever iterates over the steps of a trainer does not wait for input all the time."""
    probe = Probe()

    def steps() -> Iterator[int]:
        for number in from_generator(probe):
            helper(probe)
            probe.train()
            yield number

    def run() -> None:
        for _ in steps():
            probe.stand(0.0)

    run()
    run()
    profile = probe.stacks.profile()
    assert profile.input_s / profile.seconds == pytest.approx(1 / 3, abs=0.05)


def test_too_few_steps() -> None:
    """Nothing is said of a loop that was hardly seen, nor of one that does not train."""
    probe = Probe()
    assert probe.stacks.profile() == Profile(0, 0.0, 0.0, "", ())
    probe.train()
    helper(probe)
    assert probe.stacks.profile().steps == 0


def test_what_was_cleared_counts_no_more() -> None:
    """Warming up is no step's share."""
    probe = Probe()
    by_for(probe, from_generator(probe))
    probe.stacks.clear()
    assert probe.stacks.profile().steps == 0
    by_for(probe, range(STEPS))
    assert probe.stacks.profile().input_s == 0
