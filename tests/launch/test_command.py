"""What the ranks execute follows from what stands after the options."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddlcore.launch.ranks.command import may_run_python, ranks_path, resolve_command

SH = "/bin/sh"


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "plain").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "resolved"),
    [
        (["train.py", "--lr", "1"], ["PY", "train.py", "--lr", "1"]),
        (["-m", "package.module", "-np", "3"], ["PY", "-m", "package.module", "-np", "3"]),
        (["python", "train.py"], ["PY", "train.py"]),  # not on this PATH: our own
        (["python3", "-W", "error", "train.py"], ["bin/python3", "-W", "error", "train.py"]),
        (["python3", "-u", "-m", "absent", "absent.py"], ["bin/python3", "-u", "-m", "absent", "absent.py"]),
        (["python3", "-c", "pass", "absent.py"], ["bin/python3", "-c", "pass", "absent.py"]),
        (["python3", "-uc", "pass"], ["bin/python3", "-uc", "pass"]),
        (["python3"], ["bin/python3"]),
        (["./tool", "x.py"], ["./tool", "x.py"]),
        ([SH, "-c", "true"], [SH, "-c", "true"]),
    ],
)
def test_commands_that_work(command: list[str], resolved: list[str], tmp_path: Path) -> None:
    """Scripts and modules get this interpreter, programs are looked up on PATH, arguments stay as they are."""
    found = resolve_command(command, path=str(tmp_path / "bin"), interpreter="PY")
    assert [word.replace(f"{tmp_path}/", "") for word in found] == resolved


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ([], "no command"),
        (["-m"], "no module named"),
        (["absent.py"], "absent.py: no such file"),
        (["python3", "absent.py"], "absent.py: no such file"),
        (["python3", "-X", "dev", "-B", "absent.py"], "absent.py: no such file"),
        (["no-such-program"], "no such program on PATH"),
        (["./absent"], "no such file"),
        (["./plain"], "may not be executed"),
        (["./bin"], "is a directory"),
    ],
)
def test_commands_that_cannot_work(command: list[str], complaint: str, tmp_path: Path) -> None:
    """They are refused in one line that says what is missing."""
    with pytest.raises(ValueError, match=complaint) as raised:
        resolve_command(command, path=str(tmp_path / "bin"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "in_environment", "expected"),
    [
        ("/usr/bin", True, "/venv/bin:/usr/bin"),
        ("/usr/bin:/venv/bin", True, "/usr/bin:/venv/bin"),
        ("", True, "/venv/bin"),
        ("/usr/bin", False, "/usr/bin"),
    ],
)
def test_the_environment_of_ddl_comes_first_unless_path_has_it(path: str, in_environment: bool, expected: str) -> None:
    """So that `.venv/bin/ddl run python` is .venv's python."""
    assert ranks_path(path.replace(":", os.pathsep), "/venv/bin/python", in_environment) == expected


@pytest.mark.parametrize(
    ("program", "python"),
    [(sys.executable, True), (SH, True), ("./tool", True), ("./plain", False), ("/bin/true", False)],
)
def test_what_is_plainly_no_python(program: str, python: bool) -> None:
    """Kernels are compiled beforehand only where a rank may need them."""
    assert may_run_python([program]) is python
