"""Horovod's own tests, as the runner would run them from a checkout: here a small one of our own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import horovod_suite
from tools.horovod_suite import TestOutcome, main, markdown, worst

TESTS = """
import unittest
import pytest
from mock import Mock
from horovod.common.basics import HorovodBasics
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.util.threads import in_thread

hvd = HorovodBasics(__file__)

class SmallTests(unittest.TestCase):
    def test_a_rank(self):
        hvd.init()
        in_thread(target=Mock()).join()
        self.assertEqual(get_env_rank_and_size(), (hvd.rank(), hvd.size()))

    def test_b_fails_on_rank_1(self):
        hvd.init()
        self.assertEqual(hvd.rank(), 0, "not here")

    def test_c_is_skipped(self):
        self.skipTest("no GPU")

    @pytest.mark.skipif(True, reason="another release")
    def test_c_is_marked(self):
        self.fail("it is skipped")

    def test_d_never_ends(self):
        import time
        time.sleep(100)

    def test_e_ends_the_process(self):
        import os
        os._exit(3)

    def test_f_goes_on_behind(self):
        hvd.init()
        self.assertEqual(hvd.size(), 2)

@pytest.mark.skipif(True, reason="another release")
class OldTests(unittest.TestCase):
    def __init__(self, name):
        raise RuntimeError("it is skipped")

    def test_a(self):
        pass
"""


def test_the_worst_rank_counts() -> None:
    """Of two ranks with equal outcomes, the one counts whose error does not come from the end of another rank."""
    passed, echo, cause = (
        TestOutcome("t", "passed"),
        TestOutcome("t", "failed", "PeerLost"),
        TestOutcome("t", "failed", "5 != 6"),
    )
    assert worst([passed, echo, cause]) is cause and worst([echo, passed]) is echo


def test_the_table_has_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test that does not pass stands beside its reason, or beside its outcome if there is no reason."""
    monkeypatch.setattr(horovod_suite, "REASONS", {"test_old": "too old"})
    rows = {"A.test_old": TestOutcome("A.test_old", "failed"), "A.test_new": TestOutcome("A.test_new", "ended")}
    lines = markdown({"f.py": {**rows, "A.test_fine": TestOutcome("A.test_fine", "passed")}})
    assert "| `f.py` | 1 | 2 | 0 |" in lines
    assert lines[-2:] == ["| too old | `A.test_old` |", "| ended | `A.test_new` |"]


@pytest.mark.long
@pytest.mark.processes
def test_a_checkout_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure on one rank is one of the test, and the tests behind it run in new ranks."""
    (tmp_path / "test/parallel").mkdir(parents=True)
    (tmp_path / "test/parallel/test_small.py").write_text(TESTS)
    monkeypatch.setattr(sys, "argv", ["horovod_suite", str(tmp_path), "--limit-s", "5"])
    assert main() == 1
    out = capsys.readouterr().out
    assert "| `test_small.py` | 2 | 3 | 3 |" in out
    for said in (
        "test_b_fails_on_rank_1 failed",
        "not here",
        "test_d_never_ends failed",
        "test_e_ends_the_process ended",
    ):
        assert said in out
