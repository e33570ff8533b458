"""One row of the results: what was checked, its target and verdict; and how programs send rows to the main program."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from tools.training.report import Table, spread

__all__ = ["FAILED", "MISSES", "Row", "check", "heard", "not_measured", "number", "reasons", "table", "tell"]

HOLDS, MISSES, WITHIN = "holds", "misses", "within spread"
PASSED, FAILED, STOOD_IN, NOT_MEASURED = "passed", "FAILED", "passed, without a GPU", "not measured"
_MARK = "gpu-check row: "


@dataclass(frozen=True)
class Row:
    """One line of the table of results."""

    what: str
    target: str
    measured: str
    verdict: str
    why: str = ""  # why nothing was measured, or why it failed


def check(what: str, target: str, fault: str = "", stand_in: str = "") -> Row:
    """Return a row for a check that passes or fails.

    ``fault``: what was wrong; ``stand_in``: what ran in place of a GPU.
    """
    if fault:
        return Row(what, target, stand_in or "GPU", FAILED, fault)
    return Row(what, target, stand_in or "GPU", STOOD_IN if stand_in else PASSED)


def number(what: str, values: Sequence[float], limit: float, unit: str, at_least: bool = False) -> Row:
    """Return a row for a measurement, by the median of the rounds; it misses only if its whole 95 % interval misses."""
    of = spread(values) if len(values) > 1 else None
    middle = statistics.median(values)
    low, high = (of.low, of.high) if of else (middle, middle)
    target = f"{'≥' if at_least else '≤'} {limit:g} {unit}"
    good = middle >= limit if at_least else middle <= limit
    open_ = high >= limit if at_least else low <= limit
    return Row(
        what, target, f"{middle:.3g} {unit} [{low:.3g}, {high:.3g}]", HOLDS if good else WITHIN if open_ else MISSES
    )


def not_measured(what: str, target: str, why: str) -> Row:
    """Return a row for a number that this machine cannot measure."""
    return Row(what, target, "–", NOT_MEASURED, why)


def tell(rows: Iterable[Row]) -> None:
    """Print the rows for the program that has started this one."""
    for row in rows:
        print(_MARK + json.dumps(asdict(row)), flush=True)


def heard(line: str) -> Row | None:
    """Return the row that a program's line contains, or None for any other line.

    A rank's line may begin with its rank.
    """
    _, mark, rest = line.partition(_MARK)
    return Row(**json.loads(rest)) if mark else None


def table(rows: Sequence[Row]) -> Table:
    """Return the rows with a head; a number refers to a row's reason, see ``reasons``."""
    numbers = {why: i + 1 for i, why in enumerate(reasons(rows))}
    return [["what", "target", "measured", "holds?"]] + [
        [row.what, row.target, row.measured, row.verdict + (f" ({numbers[row.why]})" if row.why else "")]
        for row in rows
    ]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return why rows failed or were not measured, each reason once, in order: the first has the number 1."""
    return list(dict.fromkeys(row.why for row in rows if row.why))
