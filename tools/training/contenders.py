"""Trains one model with several contenders in alternation, and takes the times; knows no framework and no targets."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import ddlcore
from tools.training.frameworks import FRAMEWORKS
from tools.training.meeting import Meeting

__all__ = ["Contender", "Measured", "Trainings", "measure"]

WARM_STEPS = 12  # by then ddl has found the period and replays, and a peer has settled (DDP rebuilds its buckets)
BLOCK_S = 0.5  # how long one contender trains, about, before the next has its turn
LEAST_STEPS, MOST_STEPS = 2, 50  # of such a block
WARM_SHARE = 5  # 1/20 of a block's steps, at least one, are untimed: the caches hold another contender's data
COUNTED = ("control_messages", "buckets_replayed", "divergences")


@dataclass(frozen=True)
class Measured:
    """The measurements of one model. ``seconds`` of a step, by contender and round: the mean over the ranks."""

    model: str
    ranks: int
    samples: int  # in one step of one rank
    parameters: int
    tensors: int
    steps: int  # of a block
    seconds: dict[str, list[float]]
    control_messages: float  # ddl's, for each step of the timed blocks: the maximum over the ranks
    replayed: float  # ddl's buckets that were replayed, for each such step: the minimum over the ranks
    divergences: int  # how often ranks asked to leave replay meanwhile, in total
    framework: str = "torch"
    waiting: float | None = None  # share of ddl's step that a rank waits in synchronize, median; None: not measured
    exposed: float | None = None  # share of ddl's step that is exposed in its timeline; None: no timeline was kept


class Contender(Protocol):
    """One way to train the model on this rank."""

    def steps(self, count: int) -> float:
        """Take ``count`` steps, wait until all their work is done, and return the seconds of one step."""
        ...


@dataclass(frozen=True)
class Trainings:
    """A framework's contenders for a model on one rank, which start with equal weights and use the same inputs."""

    contenders: Mapping[str, Contender]
    samples: int  # in one step of one rank
    sizes: list[int]  # elements of each parameter
    check: Callable[[], None]  # RuntimeError unless ddl and the peer have the same parameters after as many steps
    waiting: Callable[[], list[float]] | None = None  # for each step so far, its share in which this rank waits for ddl


def _block_steps(contenders: Mapping[str, Contender], meet: Meeting) -> int:
    """Return the steps of a timed block, the same on every rank, so that the slowest contender takes about BLOCK_S."""
    slowest_s = 0.0
    for contender in contenders.values():
        meet()
        slowest_s = max(slowest_s, *meet.of_ranks(contender.steps(3)))
    return max(LEAST_STEPS, min(MOST_STEPS, round(BLOCK_S / slowest_s)))


def measure(framework: str, model: str, rounds: int, room: str, terminal: str = "") -> Measured:
    """Train ``model`` on all ranks; every rank calls this with the same arguments.

    Each round gives each contender a block of steps, in a shuffled order that is the same on every rank. Each block
    begins with some steps that are not timed. ``room``: the path by which the ranks meet. ``terminal``: the device on
    which rank 0 shows progress.
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
    contenders, settling = trainings.contenders, FRAMEWORKS[framework].settling
    for contender in contenders.values():
        meet()
        contender.steps(WARM_STEPS)
    trainings.check()
    steps = _block_steps(contenders, meet)
    own: dict[str, list[float]] = {name: [] for name in contenders}
    counted = dict.fromkeys(COUNTED, 0)
    shares = (trainings.waiting or list)()
    untimed = len(shares)
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for _ in rounds:
        shuffle(order)
        for turn in order:
            contenders[turn].steps(max(settling, steps // WARM_SHARE))
            meet()
            before = ddlcore.stats()
            own[turn].append(contenders[turn].steps(steps))
            meet()
            if turn == "ddl":
                after = ddlcore.stats()
                for key in COUNTED:
                    counted[key] += after[key] - before[key]  # type: ignore[literal-required]  # COUNTED are keys of it
    of_ranks = {turn: [meet.of_ranks(value) for value in values] for turn, values in own.items()}
    timed = len(own["ddl"]) * steps
    # The median over the steps, as in a timeline: one step that another program disturbs moves a mean, not a median.
    waiting = meet.of_ranks(statistics.median(shares[untimed:])) if shares else []
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
        waiting=statistics.fmean(waiting) if waiting else None,
    )


def _shown(rounds: int, name: str, terminal: str) -> Iterator[int]:
    """Yield the rounds, with a progress bar on ``terminal`` if there is one."""
    if not terminal:
        yield from range(rounds)
        return
    from rich.console import Console
    from rich.progress import track

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(terminal, "w", encoding="utf-8"))
        yield from track(range(rounds), name, console=Console(file=file), transient=True)
