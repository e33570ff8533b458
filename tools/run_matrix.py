"""Run tests and examples with the versions of Python and of the frameworks that users have, and write the table of results.

    python tools/run_matrix.py [CELL …] [--list] [--folder KEEP] [--table docs/install.md]

A cell is one environment, made of packages from PyPI only. Without arguments, all cells are run, one after the other, each
in an environment that is removed after it. A cell whose Python is not on this machine is left out, and said to be so. The
results are kept in build/matrix, and the table in the documentation has a row for each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.matrix.cells import CELLS
from tools.matrix.running import run_cell
from tools.matrix.table import write_table
from tools.release.steps import ROOT

RESULTS = ROOT / "build/matrix"


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that the command line names, and return the exit code: 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and run none")
    parser.add_argument("--folder", type=Path, help="where environments are made, and kept; default: gone after")
    parser.add_argument(
        "--table", type=Path, default=ROOT / "docs/install.md", help="the page whose table gets the results"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.cells if name not in CELLS]
    if unknown:
        parser.error(f"no cell {', '.join(unknown)}; there are {', '.join(CELLS)}")
    if given.list:
        print("\n".join(CELLS))
        return 0
    failed = []
    for name in given.cells or CELLS:
        with contextlib.ExitStack() as stack:
            folder: Path = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-matrix-")))
            folder.mkdir(parents=True, exist_ok=True)
            room = folder.resolve() / name
            shutil.rmtree(room, ignore_errors=True)
            result = run_cell(CELLS[name], room, partial(_say, name))
        if result is None:
            _say(name, f"left out: there is no Python {CELLS[name].python} here")
            continue
        _say(name, f"{'FAILED' if result.fault else 'passed'} after {result.seconds} s")
        if result.fault:
            print(result.fault, flush=True)
            failed.append(name)
        result.write(RESULTS)
    write_table(given.table, RESULTS)
    print(f"matrix: {f'failed: {chr(44).join(failed)}' if failed else 'all that ran has passed'}")
    return int(bool(failed))


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
