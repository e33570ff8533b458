"""Choose one typical step of a trace, which is drawn in a picture. All functions are pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl_doctor.timeline.intervals import Cover, Interval
from ddl_doctor.timeline.summary import BucketRun, Summary, steps_of

ALIKE = 0.005  # exposed shares count as equal if they differ by no more than half a percent of a step


@dataclass(frozen=True)
class TypicalStep:
    """One step of the first rank, from ``begin`` to ``end`` in µs on the clock of the trace.

    The picture of the step shows the events of all ranks between these two times.
    """

    rank: int  # the first rank of the trace
    number: int  # number of the step among the steps that this rank replayed, from 1
    count: int  # number of the steps that this rank replayed
    begin: float
    end: float
    exposed: float  # share of the step in which a user thread waits in ddl, as the mean over the ranks


def typical_step(
    summary: Summary, runs: Sequence[BucketRun], waits: Mapping[int, Sequence[Interval]]
) -> TypicalStep | None:
    """Return the step that represents ``summary`` best, or None if the first rank replayed no whole step.

    ``summary`` was computed from ``runs`` and ``waits``. The exposed share of a step on a rank is the part of the step
    in which a user thread of the rank waits in ddl. The chosen step is the one whose exposed share, as the mean over
    the ranks, is nearest to ``summary.exposed``. Steps whose distances are at most ALIKE count as equally near. Among
    equally near steps, two values are compared with their medians over all steps: the length of the step, and the
    exposed share on each rank. The step with the smallest differences is chosen. The length alone would not be enough,
    because the exposed share depends on it: a late rank makes the step longer for all ranks.
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
