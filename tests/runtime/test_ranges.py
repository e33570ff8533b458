"""Where several frameworks are in use, a bucket appears in the profiler of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import pytest

from ddlcore.contracts.adapter import Adapter
from ddlcore.runtime.ranges import ranges_of


class Profiled:
    """What an adapter does about ranges."""

    def __init__(self, log: list[str], runs: bool) -> None:
        self.log = log
        self.runs = runs

    def range(self, name: str) -> AbstractContextManager[object] | None:
        return self._range(name) if self.runs else None

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self.log.append(f"+{name}")
        yield
        self.log.append(f"-{name}")


@pytest.mark.parametrize("runs", [(), (False,), (True,), (True, False), (True, True), (False, True, True)])
def test_each_that_runs_sees_it(runs: tuple[bool, ...]) -> None:
    log: list[str] = []
    with ranges_of([cast("Adapter", Profiled(log, one)) for one in runs])("x"):
        log.append("within")
    several = sum(runs)
    assert log == ["+x"] * several + ["within"] + ["-x"] * several
