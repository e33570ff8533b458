"""Writes the results of the matrix as a table into a page of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from tools.matrix.cells import CELLS
from tools.matrix.running import Result

__all__ = ["BEGIN", "END", "read_results", "table", "write_table"]

BEGIN = "<!-- the table between these lines is written by `make test-matrix` -->"
END = "<!-- end of the table -->"
_HEAD = ("cell", "Python", "versions", "tests passed", "skipped", "examples", "date")


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results in ``folder``, by the name of their cell, in the order of the cells."""
    found = {}
    for name in CELLS:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = Result(**json.loads(path.read_text(encoding="utf-8")))
    return found


def table(results: dict[str, Result]) -> list[str]:
    """Return the lines of the table."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for one in results.values():
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        passed = str(one.passed) if not one.fault else "**failed**"
        rows.append((f"`{one.cell}`", one.python, versions, passed, str(one.skipped), str(one.examples), one.day))
    return [f"| {' | '.join(row)} |" for row in rows]


def write_table(page: Path, folder: Path) -> None:
    """Replace the rows of the cells in ``folder`` in the table of ``page``; rows of other cells stay as they are."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")}
    head, rule, *fresh = table(read_results(folder))
    known |= {line.split("`")[1]: line for line in fresh}
    rows = [known[name] for name in CELLS if name in known]
    page.write_text("\n".join([f"{before}{BEGIN}", "", head, rule, *rows, "", f"{END}{after}"]), encoding="utf-8")
