"""Gives the files of tests to the workers of pytest-xdist, so that a run goes on after a worker has crashed.

The conftest of the repository imports the hook of this module.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["pytest_xdist_make_scheduler"]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Return the scheduler for ``--dist loadfile``; None: pytest-xdist chooses one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _reschedule(self, node: Any) -> None:
            # A worker begins a test only when it has a second one, or knows that there is none. pytest-xdist 3.8 gives
            # a worker one file at a time, the next when the worker has ended a test. This is not enough after a crash:
            # the new worker may get a file with one test, and others get files of the crashed worker whose tests have
            # all ended. Such a worker ends no test, and the run would never end.
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return FileScheduling(config, log)
