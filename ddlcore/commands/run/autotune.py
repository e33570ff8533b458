"""Search for better settings while a job trains, for ``ddl run --autotune``."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from ddlcore.commands.search_bar import Bar
from ddlcore.commands.search_lines import SearchLines
from ddlcore.launch.job.launcher import JobDescription
from ddlcore.launch.job.watch import draws
from ddlcore.process.search import build_search_driver
from ddlcore.tune.driver import SearchDriver, SearchWatcher
from ddlcore.tune.session import Phase


def after_training(launch: JobDescription) -> None:
    """Remove the progress bar, if there is one. If the search has not ended, print which parts of the search remain.

    If no step was measured, print this fact instead.
    """
    for bar in launch.watches:
        if isinstance(bar, Bar):
            bar.clear()
    session = launch.driver.session if isinstance(launch.driver, SearchDriver) else None
    if session is None:
        _say("no step was measured: a search needs steps that repeat and allreduce")
    elif session.phase is not Phase.DONE:
        _say(f"the training has ended before the search; still to do: {session.lacks()}")


def _say(text: str, bar: Bar | None = None) -> None:
    (bar or Bar()).say(f"ddl run: autotune: {text}")


def while_training(launch: JobDescription) -> JobDescription:
    """Return a copy of ``launch`` with a search for better settings. The search runs while the job trains.

    Raises the exceptions of ``build_search_driver``.
    """
    bar = Bar() if os.isatty(2) and not draws(launch.settings, launch.registry) else None
    watchers: list[SearchWatcher] = [
        SearchLines(partial(_say, bar=bar), samples=bar is None),
        *([bar] if bar is not None else []),
    ]
    driver = build_search_driver(launch.settings, launch.registry, launch.layout.ranks, launch.launched_by, watchers)
    return replace(launch, driver=driver, watches=() if bar is None else (bar,))
