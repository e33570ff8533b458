"""How the sequence that a loop of calls without names repeats is found, without an engine and without ranks."""

from __future__ import annotations

import random
import time

import pytest

from ddlcore.runtime.repetitions import MOST_REPLAYED, Repetitions


def found_at(calls: str, most: int = 10) -> tuple[int, int]:
    """Repeat ``calls`` and return the first number of calls at which all of them are found, and the number of repetitions."""
    one = Repetitions()
    for at in range(most * len(calls)):
        if one.add(calls[at % len(calls)]) == len(calls):
            return at + 1, at // len(calls) + 1
    raise AssertionError(f"{calls} was not found in {most} repetitions")


@pytest.mark.parametrize("calls", ["a", "ab", "abc", "aab", "aabb", "abcabd"])
def test_a_sequence_is_found_at_its_third_repetition(calls: str) -> None:
    assert found_at(calls) == (3 * len(calls), 3)


@pytest.mark.parametrize("layers", [2, 3, 8, 64, 128])
def test_equal_layers_within_a_step(layers: int) -> None:
    """As with FSDP: each layer is gathered, then gathered and scattered in reverse. The step is found, not the layer."""
    step = "g" * layers + "gs" * layers + "r"
    one = Repetitions()
    found = [one.add(call) for _ in range(6) for call in step]
    assert all(length == len(step) for length in found[3 * len(step) :])


def test_what_was_replayed_counts() -> None:
    """A shorter schedule replays a part of each step. The detector still finds the whole step."""
    one = Repetitions()
    lengths: list[int] = []
    for _ in range(5):
        lengths += [one.add("g"), one.add("g")]
        one.replayed("ggg")
        lengths += [one.add("s"), one.add("r")]
    assert lengths[-1] == 7


def test_other_calls_in_between() -> None:
    one = Repetitions()
    for _ in range(2):
        one.add("a")
    one.clear()
    assert [one.add("a") for _ in range(3)] == [0, 0, 1]


def test_a_sequence_that_a_loop_leaves_soon_needs_more_repetitions() -> None:
    """Each time twice as many, up to a limit; one that has held for long needs only two again."""
    one = Repetitions()

    def needed() -> int:
        one.clear()
        return next(count for count in range(200) if one.add("a"))

    counts = [needed()]
    for _ in range(7):
        one.doubt("a", held=False)
        counts.append(needed())
    assert counts == [2, 4, 8, 16, 32, 64, 64, 64]
    one.doubt("a", held=True)
    assert needed() == 2


def test_other_sequences_are_not_doubted() -> None:
    one = Repetitions()
    for _ in range(5):
        one.doubt("a", held=False)
    assert [one.add(call) for call in "bcbcbc"][-1] == 2


def test_very_long_replays_are_forgotten() -> None:
    """They cost little, and what was before them does not count."""
    one = Repetitions()
    for call in "abab":
        one.add(call)
    one.replayed("c" * (MOST_REPLAYED + 1))
    assert one.add("a") == 0


def test_calls_that_never_repeat_cost_little() -> None:
    """Of two kinds, in random order: each call takes a bounded time, however many there were."""
    chance, one = random.Random(1), Repetitions()
    for _ in range(10_000):
        one.add(chance.randrange(2))
    began_s = time.process_time()
    for _ in range(10_000):
        one.add(chance.randrange(2))
    assert time.process_time() - began_s < 10
