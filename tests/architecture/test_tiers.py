"""What a share of the tests is (conftest.py): ten minutes' worth, others for each commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

LETTERS = "abcdefghijklmnopqrst"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty functions of two tests each, of which each takes 100 s."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    head = "import pytest\npytestmark = pytest.mark.long\n"
    body = "@pytest.mark.parametrize('x', range(2))\ndef test_{0}(x): pass\n"
    (tmp_path / "test_long.py").write_text(head + "".join(body.format(letter) for letter in LETTERS))
    seconds = ",".join(f'"test_long.py::test_{letter}[{x}]": 100.0' for letter in LETTERS for x in (0, 1))
    (tmp_path / "tests" / "seconds.json").write_text(f"{{{seconds}}}")
    return tmp_path


def chosen(folder: Path, word: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    done = subprocess.run([*command, str(folder), "--share", word], capture_output=True, text=True, timeout=200)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.processes
def test_a_share_is_ten_minutes_worth(folder: Path) -> None:
    """The parameters of a function stay together; the same word gives the same tests, another word others."""
    shares = [chosen(folder, word) for word in ("one", "one", "other")]
    assert [len(share) for share in shares] == [6, 6, 6]
    assert shares[0] == shares[1] != shares[2]
    assert all(len({test.partition("[")[0] for test in share}) == 3 for share in shares)


@pytest.mark.processes
def test_the_mark_slow_needs_a_reason(folder: Path) -> None:
    (folder / "test_slow.py").write_text("import pytest\n@pytest.mark.slow\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 4 and "the mark slow needs a reason: test_slow.py::test_it" in done.stderr, done.stderr
