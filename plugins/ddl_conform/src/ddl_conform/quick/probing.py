"""Try each plugin in a list, and show the progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddl_conform.quick.trials import tried
from ddlcore.commands.plugins.listing import READY, Row


def probed(found: Sequence[Row]) -> list[Row]:
    """Try each usable plugin in ``found``, and return the rows with the results of these trials."""
    usable = [row for row in found if row.state == READY and row.provider is not None]
    with _progress(len(usable)) as told:
        outcomes = dict(zip(map(id, usable), tried(usable, told)))
    return [outcomes.get(id(row), row) for row in found]


@contextmanager
def _progress(count: int) -> Iterator[Any]:
    """Yield a function that must be called with each row before the plugin of the row is tried.

    If standard error is a terminal, the function moves a progress bar with ``count`` steps; otherwise it does nothing.
    """
    if not sys.stderr.isatty():
        yield lambda row: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("probing", total=count)
        yield lambda row: bar.update(task, advance=1, description=escape(f"{row.kind} {row.name}"))
