"""Compute a table of the ranks from their pulses: step times and loads, and the ranks that differ from the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddl_doctor.reports import Pulse

from ddlcore.text.columns import aligned
from ddlcore.text.numbers import UNKNOWN, memory_size, percent

SLOWER = 1.2  # a rank is slow if its computing time is more than this number of times the median of the ranks,
LEAST_GAP = 0.05  # and is longer than the median by more than this share of a step (a smaller difference is noise)
LARGER = 1.5  # a rank is large if its memory is more than this number of times the median of the ranks
SILENT_S = 5.0  # a rank is silent after this time without a pulse, but at least 3 times its last interval of pulses
LEAST_STEPS = 10  # a figure covers at least so many steps, if known; over fewer, it depends on the times of the pulses
HEADINGS = ("rank", "host", "steps", "step ms", "comm", "cpu", "memory", "gpu", "gpu memory", "")
LEFT = ("host", "")  # headings of the columns that are aligned to the left


@dataclass(frozen=True)
class RankFigures:
    """One rank's row in the table: its figures over its last steps. None means that a figure is not known (yet)."""

    rank: int
    host: str
    steps: int = 0
    step_s: float | None = None
    waiting: float | None = None  # share of time in which the rank's threads waited for buckets
    cpu: float | None = None  # average number of cores that the rank used
    resident_bytes: int = 0
    gpu: float | None = None
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0
    marks: tuple[str, ...] = ()  # texts about the differences from the other ranks
    over: int = 0  # number of steps over which step_s was measured

    @property
    def own_s(self) -> float | None:
        """The time of a step in seconds without the time in which the rank waited.

        The other ranks wait for the rank with the longest ``own_s``.
        """
        return None if self.step_s is None or self.waiting is None else self.step_s * (1 - self.waiting)


def rows_of(
    pulses: Mapping[int, Sequence[Pulse]], hosts: Sequence[str], unheard_s: Mapping[int, float] | None = None
) -> list[RankFigures]:
    """Return a row of the table for each rank.

    ``pulses`` holds the last pulses of each rank, the oldest first, and ``hosts`` holds the host of each rank.
    ``unheard_s`` holds, for each rank, the seconds since its last pulse. If this time is too long, the figures of the
    rank are old. Then the rank is marked as silent, and does not count in the medians with which other ranks are
    compared.
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


def _row(rank: int, host: str, pulses: Sequence[Pulse]) -> RankFigures:
    if not pulses:
        return RankFigures(rank, host)
    last, step_s, waiting, cpu, steps = pulses[-1], None, None, None, 0
    first = next((one for one in reversed(pulses[:-1]) if last.steps - one.steps >= LEAST_STEPS), pulses[0])
    if last.at_s > first.at_s:
        elapsed_s = last.at_s - first.at_s
        steps = last.steps - first.steps
        step_s = elapsed_s / steps if steps > 0 else None
        waiting = min(1.0, max(0.0, (last.user_s - first.user_s) / elapsed_s))
        cpu = max(0.0, (last.cpu_s - first.cpu_s) / elapsed_s)
    gpu = last.gpu_share if last.gpu_share >= 0 else None
    return RankFigures(
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


def _marked(row: RankFigures, own_s: float | None, memory: float | None, size: int) -> RankFigures:
    marks = []
    gap_s = row.own_s - own_s if row.own_s is not None and own_s is not None else 0.0
    if (
        size > 1
        and own_s
        and row.own_s
        and row.step_s
        and row.own_s > SLOWER * own_s * (1 + 1 / row.over)  # 1 / over: the error because of the times of the pulses
        and gap_s > LEAST_GAP * row.step_s
    ):
        marks.append(f"slow: computes {row.own_s / own_s:.1f} times as long")
    if size > 1 and memory and row.resident_bytes > LARGER * memory:
        marks.append(f"large: {row.resident_bytes / memory:.1f} times the memory")
    return replace(row, marks=tuple(marks))


def _median(values: Sequence[float | None]) -> float | None:
    """Return the lower median of the known values, or None if no value is known.

    Because the median is the lower one, the slower of two ranks is compared with the faster rank.
    """
    known = [value for value in values if value is not None]
    return statistics.median_low(known) if known else None


def cells(row: RankFigures) -> tuple[str, ...]:
    """Return the figures of ``row`` as texts, in the order of ``HEADINGS``."""
    return (
        str(row.rank),
        row.host,
        str(row.steps) if row.steps else UNKNOWN,
        UNKNOWN if row.step_s is None else f"{row.step_s * 1e3:.1f}",
        percent(row.waiting),
        percent(row.cpu),
        _memory(row.resident_bytes),
        percent(row.gpu),
        f"{_memory(row.gpu_used_bytes)} of {_memory(row.gpu_total_bytes)}" if row.gpu_total_bytes else UNKNOWN,
        "; ".join(row.marks),
    )


def table_lines(rows: Sequence[RankFigures]) -> list[str]:
    """Return the table as lines of text with aligned columns. Columns without any known value are left out."""
    kept = known_columns(rows)
    lines = [[line[i] for i in kept] for line in (HEADINGS, *map(cells, rows))]
    return aligned(lines, right=[at for at, i in enumerate(kept) if HEADINGS[i] not in LEFT])


def known_columns(rows: Sequence[RankFigures]) -> list[int]:
    """Return the indices in ``HEADINGS`` of the columns in which at least one rank has a known value."""
    texts = [cells(row) for row in rows]
    return [i for i in range(len(HEADINGS)) if any(line[i] not in (UNKNOWN, "") for line in texts)]


def _memory(nbytes: int) -> str:
    return memory_size(nbytes) if nbytes else UNKNOWN
