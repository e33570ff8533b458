"""Runs one cell of the matrix: makes its environment, runs the tests and examples, and plants a fault that must be found."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from tools.environment import PYPI_ALONE
from tools.matrix.cells import Cell, Plant
from tools.matrix.interpreters import interpreter
from tools.release.steps import ROOT, Failed, run

__all__ = ["Result", "plant", "run_cell"]

# What runs the tests. The bounds are stated again, because a cell with the oldest versions takes the oldest of these, too.
RUNNERS = (
    "hypothesis>=6.140",
    "ml_dtypes>=0.3.1",
    "psutil>=5.9",
    "pytest>=9",
    "pytest-random-order>=1.1",
    "pytest-reportlog>=1",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "pyyaml>=6",
    "scikit-learn>=1.5",
)
# The tests themselves use these packages of ours, so every cell has them.
OURS = ("ddl_conform", "ddl_doctor")
INSTALL_LIMIT_S = 2400.0
TESTS_LIMIT_S = 5400.0
EXAMPLE_LIMIT_S = 600.0
# Where a warning is given: in our own packages, or in a test.
_OUR_MODULES = r"(ddlcore|ddl_\w+|horovod|plugins|tests)(\..*)?$"
_CHANGES = ("DeprecationWarning", "FutureWarning", "PendingDeprecationWarning")
# The warnings of processes that tests start; pytest has filters of its own.
_STRICT = f"""\
import warnings
for kind in ({", ".join(_CHANGES)}):
    warnings.filterwarnings("error", category=kind, module={_OUR_MODULES!r})
"""


@dataclass
class Result:
    """What became of a cell. ``fault`` is empty if everything passed."""

    cell: str
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    skipped: int = 0
    examples: int = 0
    fault: str = ""
    day: str = ""
    seconds: int = 0

    def write(self, folder: Path) -> None:
        """Write this result as JSON into ``folder``. It replaces an earlier result of the same cell."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.cell}.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def run_cell(cell: Cell, folder: Path, say: Callable[[str], None]) -> Result | None:
    """Run ``cell`` in an environment made in ``folder``, and return the result. ``say`` gets a line for each step.

    Returns None if this machine has no such Python.
    """
    python = interpreter(cell.python)
    if python is None:
        return None
    result = Result(cell.name, day=date.today().isoformat())
    begun_s = time.monotonic()
    room = _Room(cell, python, folder)
    try:
        room.install()
        result.python, result.versions = room.versions()
        say(f"installed: Python {result.python}, {', '.join(f'{name} {one}' for name, one in result.versions.items())}")
        for example in cell.examples:
            room.example(example)
            result.examples += 1
        say(f"{result.examples} examples passed")
        result.passed, result.skipped = room.tests()
        say(f"{result.passed} tests passed, {result.skipped} skipped")
        room.plant_is_found()
        say(f"found without {cell.plant.lines.removeprefix('del ')}")
    except Failed as failed:
        result.fault = str(failed)
    result.seconds = round(time.monotonic() - begun_s)
    return result


class _Room:
    """The environment of one cell, and what is done in it. All methods raise Failed if something fails."""

    def __init__(self, cell: Cell, python: Path, folder: Path) -> None:
        self._cell = cell
        self._base = python
        self._folder = folder
        self._python = folder / "bin/python"

    def install(self) -> None:
        """Make the environment. Our own packages come from this tree, and all others from PyPI."""
        cell = self._cell
        ours = [".", *(f"plugins/{name}" for name in dict.fromkeys((*OURS, *cell.plugins)))]
        options = ["--resolution", "lowest-direct"] if cell.oldest else []
        words = [*options, *cell.packages, *RUNNERS, *(word for one in ours for word in ("-e", one))]
        self._run(self._base, ROOT / "tools/environment.py", self._folder, *words, limit_s=INSTALL_LIMIT_S)
        if cell.strict:
            (self._site() / "strict_warnings.py").write_text(_STRICT, encoding="utf-8")
            (self._site() / "strict_warnings.pth").write_text("import strict_warnings\n", encoding="utf-8")

    def versions(self) -> tuple[str, dict[str, str]]:
        """Return the version of Python, and that of each library that the cell shows."""
        look = (
            "import json, platform, sys; from importlib.metadata import version; "
            "from ddlcore.contracts.library import installed_version as of; "
            "print(json.dumps([platform.python_version(), {name: of(name) or version(name) for name in sys.argv[1:]}]))"
        )
        python, found = json.loads(self._run(self._python, "-c", look, *self._cell.shown))
        return python, found

    def example(self, words: str) -> None:
        """Run an example on two ranks; it must end with exit code 0, and learn if it says how much it has learned."""
        command = ("ddl", "run", "-np", "2", "python", *shlex.split(words))
        shown = self._run(self._folder / "bin" / command[0], *command[1:], limit_s=EXAMPLE_LIMIT_S)
        accuracy = re.search(r"test accuracy ([\d.]+) %", shown)
        if accuracy is not None and float(accuracy[1]) < 95.0:
            raise Failed(f"{words}: test accuracy {accuracy[1]} %")

    def tests(self) -> tuple[int, int]:
        """Run the tests of the cell. Return how many have passed, and how many were skipped."""
        filters = []
        if self._cell.strict:
            lines = [f"error::{kind}:{_OUR_MODULES}" for kind in _CHANGES]
            filters = ["-o", "filterwarnings=" + "\n".join(lines)]
        shown = self._run(self._python, "tools/run_tests.py", *filters, *self._cell.tests, limit_s=TESTS_LIMIT_S)
        passed, skipped = re.findall(r"^(\d+) passed, \d+ failed(?:, (\d+) skipped)?$", shown, re.MULTILINE)[-1]
        return int(passed), int(skipped or 0)

    def plant_is_found(self) -> None:
        """Plant the fault of the cell, and check that the first example or a test fails with an error that names it."""
        plant(self._cell.plant, self._site())
        try:
            self.example(self._cell.examples[0])
            options = ("-q", "-x", "-n", "4", "-m", "not long and not soak")
            self._run(self._python, "-m", "pytest", *options, *self._cell.tests, limit_s=TESTS_LIMIT_S)
        except Failed as failed:
            if self._cell.plant.gone in str(failed):
                return
            raise Failed(f"something else than the planted fault failed: {failed}") from None
        raise Failed(f"a planted fault was not found: {self._cell.plant.file}: {self._cell.plant.lines}")

    def _site(self) -> Path:
        (site,) = self._folder.glob("lib/python*/site-packages")
        return site

    def _run(self, *words: str | Path, limit_s: float = 900.0) -> str:
        return run(words, ROOT, path=self._folder / "bin", environ=PYPI_ALONE, limit_s=limit_s)


def plant(one: Plant, site: Path) -> None:
    """Add the lines of ``one`` to its file in ``site``, the folder with the packages of an environment.

    The file is replaced, not written: it may be one file with that of a cache, and of other environments.
    """
    path = site / one.file
    text = path.read_text(encoding="utf-8")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(f"{text}\n{one.lines}\n", encoding="utf-8")
    part.replace(path)
