"""What a transport's capabilities rule out is not collected where its suite offers them, and only that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddlcore.contracts.transport import Capabilities
from ddlcore.testing import TransportSuite
from tests.conformance.test_transports import TestThreads

SUITE = """
from ddlcore.builtin.threads import ThreadsTransport
from ddlcore.contracts.transport import Capabilities
from ddlcore.testing import TransportSuite


class Less(ThreadsTransport):
    capabilities = Capabilities(one_host=True, abort=False)


class TestLess(TransportSuite):
    sizes = (2,)
    offers = {offers}

    def make(self, size):
        return [Less() for _ in range(size)]
"""


def counts(directory: Path, offers: str) -> dict[str, int]:
    """What pytest says of the suite with these ``offers``, by word."""
    path = directory / "test_less.py"
    path.write_text(SUITE.format(offers=offers))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ddlcore.testing.collecting"]
    words += ["-k", "plan or bucket or abort or entr or offered or barrier", "--rootdir", str(directory), str(path)]
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=400, check=False)
    told = done.stdout.strip().splitlines()[-1]
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|deselected|failed)", told)}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_as_many_as_would_be_skipped(tmp_path: Path) -> None:
    """Without ``offers`` they are skipped one by one, with them there are none; the same tests pass."""
    skipped, left_out = counts(tmp_path, "None"), counts(tmp_path, "Less.capabilities")
    assert skipped["skipped"] > 10
    assert "skipped" not in left_out and "failed" not in left_out
    assert left_out["passed"] == skipped["passed"]
    assert left_out["deselected"] == skipped["deselected"] + skipped["skipped"]


def test_a_suite_that_offers_less_than_it_has_fails() -> None:
    """Else a plugin could have tests left out that its transport might fail."""

    class Modest(TestThreads):
        offers = Capabilities(one_host=True)

    suite: TransportSuite = Modest()
    suite.setup_method()
    try:
        with pytest.raises(AssertionError, match="offers differs from the capabilities"):
            suite.test_what_is_offered_is_what_is_made()
    finally:
        suite.teardown_method()
