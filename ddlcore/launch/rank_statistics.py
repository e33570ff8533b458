"""What follows from the pulses of ranks: step times, shares, and who is uneven. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddlcore.messages import Pulse

__all__ = ["HEADINGS", "Row", "cells", "known_columns", "rows_of", "table_lines"]

SLOWER = 1.2  # times the median of what ranks compute,
LEAST_GAP = 0.05  # and by so much of a step: below that it is noise
LARGER = 1.5  # times the median of what ranks hold
SILENT_S = 5.0  # without a word, or three times what lay between its last two
LEAST_STEPS = 10  # that a figure is of, where known: one of fewer tells when pulses came
HEADINGS = ("rank", "host", "steps", "step ms", "comm", "cpu", "memory", "gpu", "gpu memory", "")


@dataclass(frozen=True)
class Row:
    """One rank over its last steps. None: not known (yet)."""

    rank: int
    host: str
    steps: int = 0
    step_s: float | None = None
    waiting: float | None = None  # which share of its time its threads waited for buckets
    cpu: float | None = None  # cores that were busy for it
    resident_bytes: int = 0
    gpu: float | None = None
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
    marks: tuple[str, ...] = ()  # in what it differs from the others
    over: int = 0  # steps that step_s is of

    @property
    def own_s(self) -> float | None:
        """What a step takes without waiting for others: the rank whose is longest is the one that all wait for."""
        return None if self.step_s is None or self.waiting is None else self.step_s * (1 - self.waiting)


def rows_of(
    pulses: Mapping[int, Sequence[Pulse]], hosts: Sequence[str], unheard_s: Mapping[int, float] | None = None
) -> list[Row]:
    """``pulses``: of each rank the last ones, the oldest first; ``hosts``: by rank its host.

    ``unheard_s``: by rank, how long ago the last one came. The figures of one that is silent are old: it is marked, and
    the others are not held against it.
    """
    rows = [_row(rank, host, pulses.get(rank, ())) for rank, host in enumerate(hosts)]
    silent = {
        rank: f"silent for {s:.0f} s"
        for rank, s in (unheard_s or {}).items()
        if s >= max(SILENT_S, 3.0 * _between_s(pulses.get(rank, ())))
    }
    heard = [row for row in rows if row.rank not in silent]
    own = _median([row.own_s for row in heard])
    memory = _median([float(row.resident_bytes) if row.resident_bytes else None for row in heard])
    return [
        replace(row, marks=(silent[row.rank],)) if row.rank in silent else _marked(row, own, memory, len(rows))
        for row in rows
    ]


def _between_s(pulses: Sequence[Pulse]) -> float:
    return pulses[-1].at_s - pulses[-2].at_s if len(pulses) > 1 else 0.0


def _row(rank: int, host: str, pulses: Sequence[Pulse]) -> Row:
    if not pulses:
        return Row(rank, host)
    last, step_s, waiting, cpu, steps = pulses[-1], None, None, None, 0
    first = next((one for one in reversed(pulses[:-1]) if last.steps - one.steps >= LEAST_STEPS), pulses[0])
    if last.at_s > first.at_s:
        elapsed_s = last.at_s - first.at_s
        steps = last.steps - first.steps
        step_s = elapsed_s / steps if steps > 0 else None
        waiting = min(1.0, max(0.0, (last.user_s - first.user_s) / elapsed_s))
        cpu = max(0.0, (last.cpu_s - first.cpu_s) / elapsed_s)
    gpu = last.gpu_share if last.gpu_share >= 0 else None
    return Row(
        rank,
        host,
        last.steps,
        step_s,
        waiting,
        cpu,
        last.resident_bytes,
        gpu,
        last.gpu_used_bytes,
        last.gpu_total_bytes,
        over=steps,
    )


def _marked(row: Row, own_s: float | None, memory: float | None, size: int) -> Row:
    marks = []
    gap_s = row.own_s - own_s if row.own_s is not None and own_s is not None else 0.0
    if (
        size > 1
        and own_s
        and row.own_s
        and row.step_s
        and row.own_s > SLOWER * own_s * (1 + 1 / row.over)  # so much of it may be when pulses came
        and gap_s > LEAST_GAP * row.step_s
    ):
        marks.append(f"slow: computes {row.own_s / own_s:.1f} times as long")
    if size > 1 and memory and row.resident_bytes > LARGER * memory:
        marks.append(f"large: {row.resident_bytes / memory:.1f} times the memory")
    return replace(row, marks=tuple(marks))


def _median(values: Sequence[float | None]) -> float | None:
    """The lower one of two in the middle: with two ranks the quicker one is what the other is held against."""
    known = [value for value in values if value is not None]
    return statistics.median_low(known) if known else None


def cells(row: Row) -> tuple[str, ...]:
    """As text, under ``HEADINGS``."""
    return (
        str(row.rank),
        row.host,
        str(row.steps) if row.steps else "–",
        "–" if row.step_s is None else f"{row.step_s * 1e3:.1f}",
        _percent(row.waiting),
        _percent(row.cpu),
        _gib(row.resident_bytes),
        _percent(row.gpu),
        f"{_gib(row.gpu_used_bytes)} of {_gib(row.gpu_total_bytes)}" if row.gpu_total_bytes else "–",
        "; ".join(row.marks),
    )


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Aligned; columns in which nothing is known are left out."""
    columns = [HEADINGS, *(cells(row) for row in rows)]
    kept = known_columns(rows)
    widths = {i: max(len(line[i]) for line in columns) for i in kept}
    texts = (0, 1, len(HEADINGS) - 1)  # first columns and the last stand to the left
    lines = []
    for line in columns:
        words = (line[i].ljust(widths[i]) if i in texts[1:] else line[i].rjust(widths[i]) for i in kept)
        lines.append("  ".join(words).rstrip())
    return lines


def known_columns(rows: Sequence[Row]) -> list[int]:
    """Indexes of those of ``HEADINGS`` under which something is known of any rank."""
    texts = [cells(row) for row in rows]
    return [i for i in range(len(HEADINGS)) if any(line[i] not in ("–", "") for line in texts)]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _gib(nbytes: int) -> str:
    if not nbytes:
        return "–"
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
