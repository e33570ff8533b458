"""``ddl plugins new`` writes the package of a new plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ddl_conform.new.package import KINDS

from ddlcore.commands.cli import main
from ddlcore.config.file import read_toml
from tests.plug.conftest import Site, site
from tests.tiers import long

__all__ = ["site"]

LARGE = ("transport", "adapter")  # the kinds whose packages have many tests


def run_pytest(folder: Path) -> dict[str, str]:
    """The tests that fail in a new package, and why."""
    path = os.pathsep.join([str(folder / "src"), *(entry for entry in sys.path if entry)])
    environ = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "500"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "tests"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=220)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    return dict(lines)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in LARGE), *long(*LARGE)])
def test_a_new_package_fails_only_for_what_is_to_be_written(kind: str, tmp_path: Path) -> None:
    """Each failure is a NotImplementedError with the name of a method; its metadata name the module with the hooks."""
    assert main(["plugins", "new", kind, "my-own", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "ddl-my-own"
    project: Any = read_toml(folder / "pyproject.toml")["project"]
    assert project["entry-points"]["ddlcore.plugins.v2"] == {"my-own": "ddl_my_own.plugin"}
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not [text for text in texts if re.search(r"@[A-Z]+@", text)]
    assert (folder / "src/ddl_my_own/py.typed").exists()
    failures = run_pytest(folder)
    assert failures
    wrong = {
        n: why for n, why in failures.items() if not re.match(r"NotImplementedError: \w+\.\w+ is still to be", why)
    }
    assert wrong == {}


@pytest.mark.processes
def test_conform_lists_what_is_to_be_written(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and each method with its place."""
    main(["plugins", "new", "compressor", "mine", "--into", str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path / "ddl-mine/src"))
    site.announce("ddl-mine", "0.1.0", "mine = ddl_mine.plugin")
    capsys.readouterr()
    assert main(["conform", "mine"]) == 1
    text = capsys.readouterr().out
    assert "wire_dtype() is still to be written" in text
    methods = re.findall(r"^    Mine\w*Compressor\.(\w+)  \(.*/compressor.py:\d+\)$", text, re.MULTILINE)
    assert methods == ["wire_dtype", "encode", "decode"]


@pytest.mark.parametrize("name", ["Mine", "a b", "", "-x", "1a", "../up", "x--y"])
def test_bad_names_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, and nothing is written."""
    assert main(["plugins", "new", "--into", str(tmp_path), "--", "fusion", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written over."""
    (tmp_path / "ddl-mine").mkdir()
    assert main(["plugins", "new", "fusion", "mine", "--into", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert list((tmp_path / "ddl-mine").iterdir()) == []
