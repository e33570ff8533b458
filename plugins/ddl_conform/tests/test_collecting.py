"""What a transport's capabilities rule out is not collected where its suite offers them, and only that."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddl_conform.collecting import pytest_collection_modifyitems, ruled_out
from ddl_conform.threads import ThreadsTransport
from ddl_conform.transport_base import only_where

from ddlcore.contracts.transport import Capabilities
from ddlcore.testing import TransportSuite
from plugins.ddl_conform.tests import (
    test_transports,  # not the class itself, whose tests pytest would collect here, too
)

SUITE = """
from ddl_conform.threads import ThreadsTransport
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
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ddl_conform.collecting"]
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

    class Modest(test_transports.TestThreads):
        offers = Capabilities(one_host=True)

    suite: TransportSuite = Modest()
    suite.setup_method()
    try:
        with pytest.raises(AssertionError, match="offers differs from the capabilities"):
            suite.test_what_is_offered_is_what_is_made()
    finally:
        suite.teardown_method()


LESS = Capabilities(one_host=True, abort=False)


class Item:
    """What pytest collects of a test that needs these capabilities. ``with_``: those that a parameter of it needs."""

    def __init__(
        self, needs: Sequence[str] = (), offers: Capabilities | None = None, with_: Sequence[str] | None = None
    ) -> None:
        self.cls = type("Suite", (), {"offers": offers})
        self.function = only_where(*needs)(lambda: None) if needs else lambda: None
        if with_ is not None:
            call = only_where(*with_)(lambda: None)
            self.callspec = SimpleNamespace(params={"size": 3, "call": call, "dtype": "float32"})


def item(*arguments: Any, **more: Any) -> Any:
    """Return an ``Item``, of which the plugin uses only what is defined there."""
    return Item(*arguments, **more)


@pytest.mark.parametrize(
    ("needs", "with_", "is_out"),
    [
        ((), None, False),
        (("one_host",), None, False),
        (("abort",), None, True),
        (("one_host", "abort"), None, True),
        ((), ("one_host",), False),
        ((), ("abort",), True),
        (("one_host",), ("abort",), True),
    ],
)
def test_a_test_is_left_out_if_it_needs_what_is_not_offered(
    needs: Sequence[str], with_: Sequence[str] | None, is_out: bool
) -> None:
    """The test itself or one of its parameters. If the suite does not say what is offered, no test is left out."""
    assert ruled_out(item(needs, LESS, with_)) is is_out
    assert ruled_out(item(needs, None, with_)) is False


def test_only_tests_of_suites_are_left_out() -> None:
    """A function without a class, and a class that is no suite."""
    function: Any = SimpleNamespace(cls=None, function=lambda: None)
    method: Any = SimpleNamespace(cls=object, function=only_where("abort")(lambda: None))
    assert not ruled_out(function) and not ruled_out(method)


def test_what_is_left_out_is_reported_as_deselected() -> None:
    """The others stay in their order."""
    items = [item(offers=LESS), item(["abort"], LESS), item(["abort"], None), item(["one_host"], LESS)]
    given, gone = list(items), []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    pytest_collection_modifyitems(config, items)
    assert items == [given[0], given[2], given[3]] and gone == [given[1]]
    pytest_collection_modifyitems(config, items)
    assert len(items) == 3 and len(gone) == 1


GUARDED = [
    name
    for name in dir(TransportSuite)
    if name.startswith("test_") and hasattr(getattr(TransportSuite, name), "only_where")
]


class LeastTransport(ThreadsTransport):
    """A transport without any capability that a standard test asks for."""

    capabilities = Capabilities(abort=False)


class Least(TransportSuite):
    """Its suite, whose tests are called one by one here."""

    __test__ = False
    sizes = (2,)

    def make(self, size: int) -> Sequence[ThreadsTransport]:
        return [LeastTransport() for _ in range(size)]


@pytest.mark.parametrize("name", GUARDED)
def test_what_may_be_left_out_skips_itself(name: str) -> None:
    """If a test runs with a transport that lacks the capability, it is skipped with a reason. So no finding is lost."""
    suite = Least()
    test = getattr(suite, name)
    assert set(test.only_where) <= {field.name for field in fields(Capabilities)}
    arguments = {
        mark.args[0]: mark.args[1][0] for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"
    }
    suite.setup_method()
    try:
        with pytest.raises(pytest.skip.Exception, match=r"^capabilities: "):
            test(**arguments)
    finally:
        suite.teardown_method()
