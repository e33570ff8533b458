"""Which tests run, and in which order (conftest.py): a share is ten minutes' worth, and others for each commit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture.inner import project, run

LETTERS = "abcdefghijklmnopqrst"


def chosen(folder: Path, *options: str) -> list[str]:
    done = run(folder, "--collect-only", *options)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.processes
def test_a_share_is_ten_minutes_worth(tmp_path: Path) -> None:
    """All tests of a function are in the share, or none. The same word chooses the same tests, and another word others."""
    body = "@pytest.mark.parametrize('x', range(2))\ndef test_{0}(x): pass\n"
    tests = "import pytest\n" + "".join(body.format(letter) for letter in LETTERS)
    seconds = {f"test_inner.py::test_{letter}[{x}]": 100.0 for letter in LETTERS for x in (0, 1)}
    folder = project(tmp_path, tests, json.dumps(seconds))
    shares = [chosen(folder, "--share", word) for word in ("one", "one", "other")]
    assert [len(share) for share in shares] == [6, 6, 6]
    assert shares[0] == shares[1] != shares[2]
    assert all(len({test.partition("[")[0] for test in share}) == 3 for share in shares)


@pytest.mark.processes
def test_the_mark_slow_needs_a_reason(tmp_path: Path) -> None:
    done = run(project(tmp_path, "import pytest\n@pytest.mark.slow\ndef test_it(): pass\n"))
    assert done.returncode == 4 and "the mark slow needs a reason: test_inner.py::test_it" in done.stderr, done.stderr


@pytest.mark.processes
def test_a_run_of_tests_that_are_alone_imports_no_other_file(tmp_path: Path) -> None:
    """The import of the other file would fail. All other runs collect both."""
    folder = project(tmp_path, "import pytest\n@pytest.mark.alone\ndef test_it(): pass\n")
    (folder / "test_other.py").write_text("raise RuntimeError('imported')\n")
    alone = run(folder, "-m", "alone and not long")
    assert alone.returncode == 0 and "1 passed" in alone.stdout, alone.stdout
    assert "imported" in run(folder, "-m", "not alone and not long").stdout


@pytest.mark.processes
def test_a_random_order_has_no_quick_tests_first(tmp_path: Path) -> None:
    """The same seed gives the same order. Tests of a class stay together, because they share what its fixtures start."""
    slow = "".join(f"@pytest.mark.slow('it is')\ndef test_{letter}(): pass\n" for letter in LETTERS)
    methods = "".join(f"    def test_{letter}(self): pass\n" for letter in LETTERS)
    folder = project(tmp_path, f"import pytest\n{slow}class TestX:\n{methods}class TestY:\n{methods}")
    plain = chosen(folder)
    assert [room(test) for test in (plain[0], plain[20], plain[40])] == ["TestX", "TestY", "slow"]
    orders = [chosen(folder, "--random-order-seed", seed) for seed in ("5", "5", "6", "7")]
    assert orders[0] == orders[1] and len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == sorted(plain) for order in orders)
    assert [room(order[0]) for order in orders] == ["slow", "slow", "TestY", "TestX"]
    for order in orders:
        assert sum(room(left) != room(right) for left, right in pairwise(order)) == 2, order


def room(test: str) -> str:
    """Return the class of a test, and "slow" for a function."""
    return test.split("::")[1] if test.count("::") == 2 else "slow"
