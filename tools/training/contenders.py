"""Trains one model in four ways in alternation, and takes the times; knows no framework and judges nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import ddlcore
from tools.training.frameworks import FRAMEWORKS
from tools.training.meeting import Meeting

__all__ = ["Contender", "Measured", "Trainings", "measure"]

WARM_STEPS = 12  # ddl has found the period and replays, a peer has settled (DDP rebuilds its buckets)
BLOCK_S = 0.5  # about how long one contender trains before the next has its turn
LEAST_STEPS, MOST_STEPS = 2, 50  # of such a block
WARM_SHARE = 5  # so many times fewer steps, one at least, go untimed before: a turn begins in another's caches
COUNTED = ("control_messages", "buckets_replayed", "divergences")


@dataclass(frozen=True)
class Measured:
    """One model's run. ``seconds`` of a step, by contender and round: the mean over the ranks."""

    model: str
    ranks: int
    samples: int  # of one rank's step
    parameters: int
    tensors: int
    steps: int  # of a block
    seconds: dict[str, list[float]]
    control_messages: float  # ddl's, a step, over the timed blocks: the most of any rank
    replayed: float  # ddl's batches run from memory, a step, likewise the least
    divergences: int  # how often a rank asked to leave replay meanwhile, all ranks together
    framework: str = "torch"
    waiting: float | None = None  # share of ddl's step that a rank stands in synchronize; None: a framework without it
    exposed: float | None = None  # share of ddl's step that ranks stand in it, by its timeline; None: none was kept


class Contender(Protocol):
    """One way to train the model in this rank. It returns only when all that its steps have to do is done."""

    def steps(self, count: int) -> float:
        """Takes ``count`` steps; seconds of one."""
        ...


@dataclass(frozen=True)
class Trainings:
    """What a framework's side makes of a model in one rank: all contenders, from the same start on the same inputs."""

    contenders: Mapping[str, Contender]
    samples: int  # of one rank's step
    sizes: list[int]  # elements of each parameter
    check: Callable[[], None]  # RuntimeError unless ddl and the peer, after as many steps, have the same parameters
    waited_s: Callable[[], float] | None = None  # how long this rank has stood in ddl's synchronize so far


def _block_steps(contenders: Mapping[str, Contender], meet: Meeting) -> int:
    """Of the timed blocks, so that the slowest contender takes about BLOCK_S; the same on every rank."""
    slowest_s = 0.0
    for contender in contenders.values():
        meet()
        slowest_s = max(slowest_s, *meet.of_ranks(contender.steps(3)))
    return max(LEAST_STEPS, min(MOST_STEPS, round(BLOCK_S / slowest_s)))


def measure(framework: str, model: str, rounds: int, room: str, terminal: str = "") -> Measured:
    """Trains ``model`` on all ranks, each of which calls this with the same arguments.

    A round gives each contender a block of steps, in an order that is shuffled alike on every rank. Each
    block of short steps begins with some that are not timed. ``room``: where the ranks meet. ``terminal``:
    the device on which rank 0 shows progress.
    """
    ddlcore.init()
    try:
        meet = Meeting(ddlcore.rank(), ddlcore.size(), room)
        with FRAMEWORKS[framework].sides().trainings(model, meet) as trainings:
            shown = _shown(rounds, model, terminal if meet.rank == 0 else "")
            return _measure(framework, model, trainings, meet, shown)
    finally:
        ddlcore.shutdown()


def _measure(framework: str, model: str, trainings: Trainings, meet: Meeting, rounds: Iterator[int]) -> Measured:
    contenders = trainings.contenders
    for contender in contenders.values():
        meet()
        contender.steps(WARM_STEPS)
    trainings.check()
    steps = _block_steps(contenders, meet)
    own: dict[str, list[float]] = {name: [] for name in contenders}
    counted = dict.fromkeys(COUNTED, 0)
    waited_s = trainings.waited_s or (lambda: 0.0)
    stood_s = 0.0
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for _ in rounds:
        shuffle(order)
        for turn in order:
            contenders[turn].steps(max(1, steps // WARM_SHARE))
            meet()
            before, before_s = ddlcore.stats(), waited_s()
            own[turn].append(contenders[turn].steps(steps))
            meet()
            if turn == "ddl":
                stood_s += waited_s() - before_s
                after = ddlcore.stats()
                for key in COUNTED:
                    counted[key] += after[key] - before[key]  # type: ignore[literal-required] # COUNTED are keys of it
    of_ranks = {turn: [meet.of_ranks(value) for value in values] for turn, values in own.items()}
    timed = len(own["ddl"]) * steps
    waiting = meet.of_ranks(stood_s / (sum(own["ddl"]) * steps))
    return Measured(
        model=model,
        ranks=meet.ranks,
        samples=trainings.samples,
        parameters=sum(trainings.sizes),
        tensors=len(trainings.sizes),
        steps=steps,
        seconds={turn: [sum(each) / len(each) for each in values] for turn, values in of_ranks.items()},
        control_messages=max(meet.of_ranks(counted["control_messages"])) / timed,
        replayed=min(meet.of_ranks(counted["buckets_replayed"])) / timed,
        divergences=round(sum(meet.of_ranks(counted["divergences"]))),
        framework=framework,
        waiting=sum(waiting) / len(waiting) if trainings.waited_s is not None else None,
    )


def _shown(rounds: int, name: str, terminal: str) -> Iterator[int]:
    """The rounds, with a bar on ``terminal`` where there is one."""
    if not terminal:
        yield from range(rounds)
        return
    from rich.console import Console
    from rich.progress import track

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(terminal, "w", encoding="utf-8"))
        yield from track(range(rounds), name, console=Console(file=file), transient=True)
