"""Explore a model: visit every state that it can reach, or follow random runs where there are too many states."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
After = TypeVar("After", bound=Hashable, covariant=True)


class Violation(Exception):
    """A promise of the model is broken; the message says which."""


class Move(Protocol[After]):
    """One thing that may happen in a state."""

    @property
    def name(self) -> str: ...

    @property
    def after(self) -> After: ...

    @property
    def is_fault(self) -> bool:
        """Return whether nothing waits for this move, so that a run may end without it."""
        ...


class Model(Protocol[S]):
    """Names the states that may follow a state, and checks promises. The last two methods raise Violation."""

    def start(self) -> S: ...

    def moves(self, state: S) -> Iterable[Move[S]]: ...

    def check(self, state: S) -> None:
        """Check what must hold at any moment."""
        ...

    def check_end(self, state: S) -> None:
        """Check what must hold when nothing can happen any more, except faults."""
        ...


@dataclass
class Explored(Generic[S]):
    """What an exploration has seen. ``trace``: the names of the moves that led to ``violation``."""

    states: int
    moves: int
    ends: int
    is_complete: bool
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.states:,} states, {self.moves:,} moves, {self.ends:,} ends"
        if self.violation:
            return "\n  ".join([f"{self.violation} ({said})", *self.trace])
        return f"{said}{'' if self.is_complete else ', not complete'}"


def explore(model: Model[S], limit: int = 1 << 62, seconds: float = 1e9) -> Explored[S]:
    """Visit every reachable state, depth first, until a promise is broken, or ``limit`` states or ``seconds`` are over."""
    start = model.start()
    came: dict[S, tuple[S, str] | None] = {start: None}
    stack = [start]
    moves = ends = 0
    until_s = time.monotonic() + seconds
    while stack:
        state = state_of_violation = stack.pop()
        try:
            goes_on = False
            for move in model.moves(state):
                moves += 1
                goes_on = goes_on or not move.is_fault
                if move.after not in came:
                    came[move.after] = (state, move.name)
                    state_of_violation = move.after
                    model.check(move.after)
                    stack.append(move.after)
                    state_of_violation = state
            if not goes_on:
                ends += 1
                model.check_end(state)
        except Violation as broken:
            return Explored(len(came), moves, ends, False, str(broken), _trace(came, state_of_violation))
        if len(came) >= limit or time.monotonic() > until_s:
            return Explored(len(came), moves, ends, False)
    return Explored(len(came), moves, ends, True)


def search(model: Model[S], runs: int) -> Iterator[Explored[S]]:
    """Follow ``runs`` random runs, then visit states for two minutes; yield both results."""
    yield walk(model, runs, seed=21)
    yield explore(model, 2_500_000, 120.0)


def walk(model: Model[S], runs: int, seed: int) -> Explored[S]:
    """Follow ``runs`` random runs to their ends, and count states and moves of all.

    Faults come early in some runs, and late in others.
    """
    chance = random.Random(seed)
    moves = ends = 0
    seen: set[int] = set()  # hashes: the states themselves would take gigabytes
    for _ in range(runs):
        state = model.start()
        names: list[str] = []
        fault_share = chance.choice((0.01, 0.03, 0.1, 0.3))  # how probable a fault is as the next move
        try:
            while True:
                possible = list(model.moves(state))
                usual = [move for move in possible if not move.is_fault]
                faults = [move for move in possible if move.is_fault]
                if not usual:
                    model.check_end(state)
                    ends += 1
                    if not faults or chance.random() < 0.5:
                        break
                among = faults if faults and (not usual or chance.random() < fault_share) else usual
                move = chance.choice(among)
                names.append(move.name)
                moves += 1
                state = move.after
                seen.add(hash(state))
                model.check(state)
        except Violation as broken:
            return Explored(len(seen), moves, ends, False, str(broken), tuple(names))
    return Explored(len(seen), moves, ends, False)


def _trace(came: Mapping[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    names: list[str] = []
    while (before := came[state]) is not None:
        state, name = before
        names.append(name)
    return tuple(reversed(names))


def follow(model: Model[S], names: Iterable[str]) -> str:
    """Follow the moves with these names, and return which promise breaks; empty if none does.

    If nothing else can happen after the last of them, the end is checked, too. Raises KeyError if a move is not possible.
    """
    state = model.start()
    try:
        for name in names:
            state = {move.name: move.after for move in model.moves(state)}[name]
            model.check(state)
        if all(move.is_fault for move in model.moves(state)):
            model.check_end(state)
    except Violation as broken:
        return str(broken)
    return ""
