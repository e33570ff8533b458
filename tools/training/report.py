"""Turns a run's times into ratios with their intervals, targets and verdicts, and these into tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl_doctor.bench.results import median_interval

from tools.bench_verdicts import LITTLE_ROOM
from tools.training.frameworks import FRAMEWORKS, PASSES

if TYPE_CHECKING:
    from tools.training.contenders import Measured

__all__ = [
    "MISSES",
    "Row",
    "Spread",
    "Table",
    "aligned",
    "efficiency",
    "exposed_table",
    "markdown",
    "missed",
    "ratio_rows",
    "ratio_table",
    "refreshed",
    "section",
    "speed_table",
    "spread",
    "verdict",
]

TARGET_RANKS = 2  # other numbers of ranks have no targets
MESSAGES = ("ddl's control messages",)
HOLDS, OPEN, MISSES = "holds", "within spread", "misses"
BOUND = "misses, at its bound"

Table = list[list[str]]  # the first row is the head


@dataclass(frozen=True)
class Spread:
    """A median, and the interval that contains the true one in 95 of 100 runs.

    With too few values, the interval is their whole range.
    """

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Row:
    """One ratio of step times, or a count. ``limit`` None: it has no target, and its verdict is ""."""

    model: str
    over: str
    spread: Spread
    limit: float | None
    verdict: str


def spread(values: Sequence[float]) -> Spread:
    """Return the median of ``values``, and its interval by order statistics."""
    low, high = median_interval(values)
    return Spread(low, statistics.median(values), high)


def verdict(of: Spread, limit: float) -> str:
    """Return the verdict: a target is missed only if the whole interval misses it."""
    return HOLDS if of.median <= limit else OPEN if of.low <= limit else MISSES


def ratio_rows(measured: Measured) -> list[Row]:
    """Return the ratios of one model: medians over the rounds, of times from the same round.

    A row for ddl's control messages in each step follows if the framework has a target for them.
    """
    framework = FRAMEWORKS[measured.framework]
    peer = framework.peer
    pairs: tuple[tuple[str, ...], ...] = (
        ("ddl", "none"),
        ("ddl", "barrier"),
        ("ddl", peer),
        (peer, "none"),
        ("barrier", "none"),
        (PASSES, "none"),
        *framework.pairs,
    )
    pairs = tuple(pair for pair in pairs if all(name in measured.seconds for name in pair))
    spreads = {
        pair: spread([a / b for a, b in zip(measured.seconds[pair[0]], measured.seconds[pair[1]])]) for pair in pairs
    }
    limits: dict[tuple[str, ...], float | None] = {}
    verdicts = {}
    if measured.ranks == TARGET_RANKS and framework.messages is not None:
        pairs += (MESSAGES,)
        count = measured.control_messages
        spreads[MESSAGES] = Spread(0.0 if measured.divergences else count, count, count)  # leaving replay needs some
        limits[MESSAGES] = framework.messages
    if measured.ranks == TARGET_RANKS:
        limits["ddl", "none"] = over_none = framework.over_none.get(measured.model)
        limits["ddl", "barrier"] = None if over_none is None else framework.over_barrier
        if peer:
            limits["ddl", peer] = framework.over_peer[measured.model]
        limits |= {pair: targets.get(measured.model) for pair, targets in framework.pairs.items()}
        verdicts = {pair: verdict(spreads[pair], limit) for pair, limit in limits.items() if limit is not None}
        if limits["ddl", "barrier"] is not None:
            either = min(verdicts["ddl", "none"], verdicts["ddl", "barrier"], key=(HOLDS, OPEN, MISSES).index)
            verdicts["ddl", "none"] = verdicts["ddl", "barrier"] = either  # one of the two targets is enough
        floor = spreads.get((PASSES, "none"))
        little_room = floor is not None and over_none is not None and floor.median - 1 > LITTLE_ROOM * (over_none - 1)
        if little_room and verdicts["ddl", "none"] == MISSES:
            verdicts["ddl", "none"] = BOUND
    return [
        Row(measured.model, " / ".join(pair), spreads[pair], limits.get(pair), verdicts.get(pair, "")) for pair in pairs
    ]


def missed(rows: Sequence[Row]) -> bool:
    """Return whether a target is certainly missed."""
    return any(row.verdict == MISSES for row in rows)


def ratio_table(rows: Sequence[Row]) -> Table:
    """Return a table with one line for each ratio."""
    table = [["model", "step time", "median", "95 % interval", "target", "verdict"]]
    for row in rows:
        target = f"<= {row.limit:.2f}" if row.limit is not None else ""
        if row.limit is not None and row.over == "ddl / barrier":
            target = "or " + target
        interval = f"[{row.spread.low:.3f}, {row.spread.high:.3f}]"
        table.append([row.model, row.over, f"{row.spread.median:.3f}", interval, target, row.verdict])
    return table


def efficiency(measured: Measured, contender: str) -> Spread:
    """Return the speed of ``contender`` relative to as many trainings that do not communicate."""
    pairs = zip(measured.seconds["none"], measured.seconds[contender])
    return spread([alone / together for alone, together in pairs])


def exposed_table(runs: Sequence[Measured]) -> Table:
    """Return a table with the exposed share of ddl's step, from its timeline and from a measurement without one.

    A rank in synchronize waits for the others, or runs a bucket. The time of a step beyond one that does not
    communicate also contains the hooks, and the contention of ranks for cache and memory, for which no rank waits.
    """
    table = [
        ["model", "ranks", "in synchronize", "by the timeline", "difference", "beyond a step alone", "95 % interval"]
    ]
    for run in runs:
        if run.exposed is not None:
            waiting = (
                [f"{run.waiting:.3f}", f"{run.exposed - run.waiting:+.3f}"] if run.waiting is not None else ["", ""]
            )
            beyond = spread([1.0 - alone / ddl for alone, ddl in zip(run.seconds["none"], run.seconds["ddl"])])
            interval = f"[{beyond.low:.3f}, {beyond.high:.3f}]"
            shown = [waiting[0], f"{run.exposed:.3f}", waiting[1], f"{beyond.median:.3f}", interval]
            table.append([run.model, str(run.ranks), *shown])
    return table


def speed_table(runs: Sequence[Measured]) -> Table:
    """Return a table with one line for each model and contender. Samples/s are those of all ranks.

    ddl's lines also have, for each step, the messages to and from the coordinator and the replayed buckets, and how
    often replay was left.
    """
    table = [["model", "contender", "ms/step", "samples/s", "efficiency", "messages", "batches", "left"]]
    for run in runs:
        for contender, values in run.seconds.items():
            step_s = statistics.median(values)
            speed = run.samples * run.ranks / step_s
            shown = f"{efficiency(run, contender).median:.0%}"
            counts = (
                [f"{run.control_messages:g}", f"{run.replayed:g}", str(run.divergences)]
                if contender == "ddl"
                else [""] * 3
            )
            table.append([run.model, contender, f"{step_s * 1e3:.2f}", f"{speed:.1f}", shown, *counts])
    return table


def aligned(table: Table) -> str:
    """Return the table as text in columns; the first two are aligned to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """Return the table in Markdown."""
    head, *rows = table
    rule = ["---" if i < 2 else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def section(runs: Sequence[Measured], command: str, machine: str) -> str:
    """Return the section of docs/benchmarks.md for these runs: command, machine, and the tables by number of ranks."""
    parts = [f"`{command}`, on {machine}:"]
    for ranks in dict.fromkeys(run.ranks for run in runs):
        of_ranks = [run for run in runs if run.ranks == ranks]
        rows = [row for run in of_ranks for row in ratio_rows(run)]
        parts += [f"**{ranks} rank{'s' * (ranks > 1)}**", markdown(ratio_table(rows)), markdown(speed_table(of_ranks))]
        exposed = exposed_table(of_ranks)
        parts += [markdown(exposed)] * (len(exposed) > 1)
    return "\n\n".join(parts)


def refreshed(text: str, section: str, marks: tuple[str, str] = FRAMEWORKS["torch"].marks) -> str:
    """Return ``text`` with ``section`` between its two marks, or at the end if ``text`` has no marks."""
    begin, end = marks
    before, begun, rest = text.partition(begin)
    after = rest.partition(end)[2] if begun else "\n"
    if not begun:
        before = before.rstrip("\n") + "\n\n" if before else ""
    return f"{before}{begin}\n{section}\n{end}{after}"
