"""Tests of the matrix of versions: of its cells, of the search for an interpreter, of planted faults, and of the table."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from ddlcore.config.loading import load_settings
from ddlcore.contracts.library import version_numbers
from ddlcore.plug.loader import load_plugins
from tools.demo import ROOT
from tools.matrix.cells import CELLS, Cell, Plant
from tools.matrix.interpreters import interpreter
from tools.matrix.running import Result, _Room, plant, run_cell
from tools.matrix.table import BEGIN, END, read_results, write_table
from tools.release.steps import Failed
from tools.run_matrix import main

PAGE = ROOT / "docs/install.md"
HERE = "{}.{}".format(*sys.version_info)


def rows() -> dict[str, str]:
    """Return the rows of the table in the documentation, by the name of their cell."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def test_cells_name_what_there_is() -> None:
    """The plugins, tests and examples that the cells name exist."""
    for cell in CELLS.values():
        assert [one for one in cell.plugins if not (ROOT / "plugins" / one).is_dir()] == []
        assert [one for one in (*cell.tests, *cell.examples) if not (ROOT / one).exists()] == []


def test_the_table_has_passed() -> None:
    """The documentation has a row for each cell, none of which has failed."""
    assert list(rows()) == list(CELLS)
    assert [name for name, row in rows().items() if "failed" in row] == []


def test_plugins_claim_what_the_table_shows() -> None:
    """The oldest and the newest release that a plugin names as tested are those of a row."""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for row in rows().values():
        for name, version in re.findall(r"([\w-]+) (\d[\w.+]*)", row.split("|")[3]):
            seen.setdefault(name, set()).add(version_numbers(version))
    registry = load_plugins(load_settings({"DDL_PLUGINS_ONLY": "ddl-torch,ddl-tf,ddl-mxnet,ddl-gloo,ddl-mpi"}))
    ranges = {one for _, provider in registry.offers() for one in provider.tested}
    assert {"torch", "numpy", "numba"} <= {one.module for one in ranges}
    for one in ranges:
        assert {version_numbers(one.oldest), version_numbers(one.newest)} <= seen[one.module], one


def test_an_interpreter_is_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program on PATH that fails is passed over for a version of pyenv, and the latest patch release is taken."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    broken = tmp_path / "shims" / f"python{HERE}"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent) + os.pathsep + "/usr/bin")
    monkeypatch.setattr("tools.matrix.interpreters.shutil.which", lambda name: str(broken))
    assert interpreter(HERE) is None
    for patch in ("2", "10"):
        python = tmp_path / "pyenv/versions" / f"{HERE}.{patch}" / "bin/python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    assert interpreter(HERE) == tmp_path / "pyenv/versions" / f"{HERE}.10" / "bin/python"
    assert interpreter("3.99") is None


def test_a_plant_replaces_the_file(tmp_path: Path) -> None:
    """Another name of the file, such as that in a cache of packages, keeps its content."""
    (tmp_path / "birds").mkdir()
    file = tmp_path / "birds/__init__.py"
    file.write_text("wings = 2\n")
    os.link(file, tmp_path / "cached.py")
    plant(Plant("birds/__init__.py", "del wings"), tmp_path)
    assert file.read_text() == "wings = 2\n\ndel wings\n"
    assert (tmp_path / "cached.py").read_text() == "wings = 2\n"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ("module 'birds' has no attribute 'wings'", ""),
        ("no space left on device", "something else than the planted fault"),
        ("", "was not found"),
    ],
)
def test_only_an_error_that_names_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, fault: str
) -> None:
    """An example or a test that fails for another reason has not found the planted fault."""

    def runs(*_args: object, **_options: object) -> str:
        if error:
            raise Failed(error)
        return ""

    monkeypatch.setattr("tools.matrix.running.run", runs)
    birds = tmp_path / "lib/python3.13/site-packages/birds.py"
    birds.parent.mkdir(parents=True)
    birds.write_text("wings = 2\n")
    one = Cell("birds", HERE, (), (), (), ("fly.py",), (), Plant("birds.py", "del wings"))
    room = _Room(one, Path(sys.executable), tmp_path)
    if not fault:
        return room.plant_is_found()
    with pytest.raises(Failed, match=fault):
        room.plant_is_found()


def test_the_table_keeps_rows_that_were_not_run(tmp_path: Path) -> None:
    """Only rows of cells with a result change; rows stand in the order of the cells, and the text around them stays."""
    first, second, *_ = CELLS
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    Result(second, "3.13.0", {"numpy": "2.5"}, 10, 2, 1, "", "2026-01-02", 5).write(tmp_path / "results")
    write_table(page, tmp_path / "results")
    Result(first, "3.10.1", {"numpy": "1.26"}, 7, 0, 1, "a test", "2026-01-03", 5).write(tmp_path / "other")
    write_table(page, tmp_path / "other")
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert [line for line in lines if line.startswith("| `")] == [
        f"| `{first}` | 3.10.1 | numpy 1.26 | **failed** | 0 | 1 | 2026-01-03 |",
        f"| `{second}` | 3.13.0 | numpy 2.5 | 10 | 2 | 1 | 2026-01-02 |",
    ]
    assert read_results(tmp_path / "other")[first].fault == "a test"


def test_a_cell_without_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out, and nothing is made."""
    monkeypatch.setattr("tools.matrix.running.interpreter", lambda version: None)
    cell = next(iter(CELLS.values()))
    assert run_cell(cell, tmp_path / "env", print) is None
    assert not (tmp_path / "env").exists()


def test_an_unknown_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names all cells."""
    with pytest.raises(SystemExit):
        main(["torch-9.9-py3.1"])
    assert "no cell torch-9.9-py3.1" in capsys.readouterr().err


def test_cells_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(CELLS)


@pytest.mark.long
def test_a_fault_is_the_result_of_a_cell(tmp_path: Path) -> None:
    """What fails, such as the installation, is told by the result, with what was known until then."""
    cell = Cell("none", HERE, ("no-such-distribution-of-anybody",), (), (), (), (), Plant("x", "y"))
    result = run_cell(cell, tmp_path / "env", print)
    assert result is not None
    assert "no-such-distribution-of-anybody" in result.fault and result.passed == 0
