"""What the ranks of a model do, and the order in which the events of the model happen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Call", "Do", "Join", "Meet", "Order", "Part", "Program", "Wait"]


@dataclass(frozen=True)
class Call:
    """Submits tensors (name, spec) in one call; an empty name is an anonymous call. ``label`` names its handle."""

    label: str
    set_id: int
    tensors: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Wait:
    """Waits for the handle of a call of this rank."""

    label: str


@dataclass(frozen=True)
class Meet:
    """Goes on when ``parties`` threads of whatever ranks stand here: a barrier of which ddl knows nothing."""

    label: str
    parties: int


@dataclass(frozen=True)
class Part:
    """Says Bye, and does nothing after it."""


@dataclass(frozen=True)
class Join:
    """Has no more data: waits until all ranks have joined."""

    label: str


Do = Call | Wait | Meet | Part | Join
Program = Sequence[Sequence[Do]]  # one row of deeds for each thread of a rank


class Order:
    """Chooses what happens next. ``eager``: how readily a deadline passes while something else can happen.

    Either at random each time, or by priorities of the actors that change now and then: that starves
    some of them for long, which chance alone hardly does.
    """

    def __init__(self, seed: int, eager: float = 0.0, prioritized: bool = False) -> None:
        self.rng = random.Random(seed)
        self.eager = eager
        self.prioritized = prioritized
        self._priority: dict[str, float] = {}

    def choose(self, actors: Sequence[str]) -> int:
        if not self.prioritized:
            return self.rng.randrange(len(actors))
        for actor in actors:
            if actor not in self._priority:
                self._priority[actor] = self.rng.random()
        best = max(range(len(actors)), key=lambda i: self._priority[actors[i]])
        if self.rng.random() < 0.05:
            self._priority[actors[best]] = self.rng.random() - self.rng.randrange(2)
        return best
