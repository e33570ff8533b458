"""Compares measurements with targets, and formats them: as a table for the terminal, and as one for the documents."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddl_doctor.bench.results import Ratio

from ddlcore.launch.ranks.environment import usable_cores

__all__ = ["LITTLE_ROOM", "Judged", "concluded", "machine_words", "markdown", "missed", "put", "table"]

LITTLE_ROOM = 0.7  # of a target: a lower bound that takes more of it leaves no room for what is measured

_COLUMNS = ("what", "size", "ddl", "peer", "measured", "target", "verdict")
_RIGHT = {"size", "ddl", "peer"}


@dataclass(frozen=True)
class Judged:
    """One measurement and its target.

    ``target`` None: it has no target. Not ``binding``: a miss does not fail the check. ``bounded``: a lower bound that
    was measured in the same run leaves no room for the target on this machine.
    """

    what: str
    size: str
    ddl: str  # ddl's own time, for the reader
    peer: str
    measured: Ratio  # a ratio, or a time in the target's unit
    target: float | None
    unit: str = "×"
    at_least: bool = True
    binding: bool = True
    bounded: bool = False

    @property
    def verdict(self) -> str:
        """The verdict: a measurement misses its target only if its whole interval misses it."""
        if self.target is None:
            return ""
        if self._meets(self.measured.middle):
            return "holds"
        best = self.measured.high if self.at_least else self.measured.low
        if self._meets(best):
            return "holds within its interval"
        if self.bounded:
            return "misses, at its bound"
        return "MISSES" if self.binding else "misses, for information"

    def _meets(self, value: float) -> bool:
        assert self.target is not None
        return value >= self.target if self.at_least else value <= self.target

    def cells(self) -> dict[str, str]:
        """Return the text of each column."""
        sign = "≥" if self.at_least else "≤"
        target = "–" if self.target is None else f"{sign} {self.target:g} {self.unit}"
        return dict(
            zip(_COLUMNS, (self.what, self.size, self.ddl, self.peer, str(self.measured), target, self.verdict))
        )


def concluded(rows: Sequence[Judged], check: bool) -> int:
    """Print how many rows miss, and which.

    Return the exit code: 1 if a row misses and ``check`` is true.
    """
    wrong = missed(rows)
    print(f"\n{len(rows)} rows, {len(wrong)} miss their target" + "".join(f"\n  {w.what}, {w.size}" for w in wrong))
    return int(bool(wrong) and check)


def missed(rows: Sequence[Judged]) -> list[Judged]:
    """Return the rows whose whole interval misses the target."""
    return [row for row in rows if row.verdict == "MISSES"]


def table(rows: Sequence[Judged]) -> list[str]:
    """Return the table as lines of aligned columns."""
    cells = [dict(zip(_COLUMNS, _COLUMNS)), *(row.cells() for row in rows)]
    widths = {name: max(len(row[name]) for row in cells) for name in _COLUMNS}
    return [
        "  ".join(
            row[name].rjust(widths[name]) if name in _RIGHT else row[name].ljust(widths[name]) for name in _COLUMNS
        ).rstrip()
        for row in cells
    ]


def markdown(rows: Sequence[Judged]) -> list[str]:
    """Return the table in Markdown."""
    rule = "|" + "|".join("--:" if name in _RIGHT else "---" for name in _COLUMNS) + "|"
    lines = [f"| {' | '.join(_COLUMNS)} |", rule]
    return lines + [f"| {' | '.join(row.cells()[name] for name in _COLUMNS)} |" for row in rows]


def put(path: Path, lines: Sequence[str], name: str = "measured") -> None:
    """Write ``lines`` to ``path``: between the marks called ``name`` if the file has them, else as the whole file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = text.partition(f"<!-- {name}: begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    body = "\n".join(lines) + "\n"
    path.write_text(f"{before}{begin}\n{body}\n{end}{after}" if begin and end else body, encoding="utf-8")


def machine_words() -> str:
    """Return the machine and the relevant versions in one line, without names of hosts or paths."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    model = found[1].strip() if found else platform.machine()
    versions = []
    for name in ("torch", "mpich", "mpi4py", "numpy"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = usable_cores()
    plural = "" if cores == 1 else "s"
    return f"{cores} core{plural} of {model}, Python {platform.python_version()}, {', '.join(versions)}"
