"""What a share of the tests is (conftest.py): ten minutes' worth, others for each commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.architecture.inner import project, run

LETTERS = "abcdefghijklmnopqrst"


def chosen(folder: Path, word: str) -> list[str]:
    done = run(folder, "--collect-only", "--share", word)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.processes
def test_a_share_is_ten_minutes_worth(tmp_path: Path) -> None:
    """The tests of a function stay together; the same word chooses the same tests, another word others."""
    body = "@pytest.mark.parametrize('x', range(2))\ndef test_{0}(x): pass\n"
    tests = "import pytest\n" + "".join(body.format(letter) for letter in LETTERS)
    seconds = {f"test_inner.py::test_{letter}[{x}]": 100.0 for letter in LETTERS for x in (0, 1)}
    folder = project(tmp_path, tests, json.dumps(seconds))
    shares = [chosen(folder, word) for word in ("one", "one", "other")]
    assert [len(share) for share in shares] == [6, 6, 6]
    assert shares[0] == shares[1] != shares[2]
    assert all(len({test.partition("[")[0] for test in share}) == 3 for share in shares)


@pytest.mark.processes
def test_the_mark_slow_needs_a_reason(tmp_path: Path) -> None:
    done = run(project(tmp_path, "import pytest\n@pytest.mark.slow\ndef test_it(): pass\n"))
    assert done.returncode == 4 and "the mark slow needs a reason: test_inner.py::test_it" in done.stderr, done.stderr
