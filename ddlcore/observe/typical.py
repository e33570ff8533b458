"""Choose the one step of a trace that stands for all of them in a picture. All functions are pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddlcore.observe.intervals import Cover, Interval
from ddlcore.observe.summary import Run, Summary, steps_of

ALIKE = 0.005  # exposed shares that differ by no more than this are the same to a reader: half a percent of a step


@dataclass(frozen=True)
class TypicalStep:
    """A step of the first rank, and what happens meanwhile on the other ranks. Times are in µs of the trace."""

    rank: int  # the rank whose step it is
    number: int  # its number among the steps that this rank replayed, from 1
    count: int  # how many steps this rank replayed
    begin: float
    end: float
    exposed: float  # share of the step in which a user thread waits in ddl, as the mean over the ranks


def typical_step(summary: Summary, runs: Sequence[Run], waits: Mapping[int, Sequence[Interval]]) -> TypicalStep | None:
    """Return the step that represents ``summary`` best. Return None if the first rank replayed no whole step.

    ``runs`` and ``waits`` are those from which the summary was computed. The exposed share of the step is that of the
    summary or, if no step has that share, the nearest. Among the steps with the same share, the one is chosen whose
    length and whose shares of the single ranks are the most usual ones. A step of median length alone would not do:
    the share of a step changes with its length, because a rank that is late makes the step longer for all.
    """
    if not summary.ranks:
        return None
    first = summary.ranks[0]
    spans = sorted(span for span in steps_of([run for run in runs if run.pid == first.pid]) if span[1] > span[0])
    if not spans:
        return None
    covers = [(row, Cover(waits.get(row.pid, ()))) for row in summary.ranks]
    usual = statistics.median(end - begin for begin, end in spans)
    found = []
    for number, (begin, end) in enumerate(spans, 1):
        shares = [cover.of((begin, end)) / (end - begin) for _, cover in covers]
        unusual = abs(math.log((end - begin) / usual))
        unusual += statistics.fmean(abs(share - row.exposed) for share, (row, _) in zip(shares, covers))
        step = TypicalStep(first.rank, number, len(spans), begin, end, statistics.fmean(shares))
        found.append((abs(step.exposed - summary.exposed), unusual, step))
    nearest = min(away for away, _, _ in found)
    alike = [(unusual, step.number, step) for away, unusual, step in found if away <= max(nearest, ALIKE)]
    return min(alike, key=lambda one: one[:2])[2]
