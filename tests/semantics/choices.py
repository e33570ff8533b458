"""Where the choices of a generated program come from: a seed, or hypothesis, which can shrink them; knows no program."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

__all__ = ["Choices", "Drawn", "Seeded"]

T = TypeVar("T")


class Choices(Protocol):
    """Each method decides one thing. The first option is the simplest: hypothesis shrinks towards it."""

    def whole(self, low: int, high: int) -> int: ...

    def pick(self, options: Sequence[T]) -> T: ...

    def chance(self, percent: int) -> bool: ...


class Seeded:
    """Choices that follow from a text, on every machine the same."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def whole(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]

    def chance(self, percent: int) -> bool:
        return self._random.randrange(100) < percent


class Drawn:
    """Choices of hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def whole(self, low: int, high: int) -> int:
        drawn: int = self._draw(st.integers(low, high))
        return drawn

    def pick(self, options: Sequence[T]) -> T:
        return options[self.whole(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.whole(0, 99) >= 100 - percent
