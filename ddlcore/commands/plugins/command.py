"""Implement ``ddl plugins``: show the table of plugins, try each plugin (--probe), and create a package (new)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ddlcore.commands.completion import directories
from ddlcore.commands.help import Command, examples
from ddlcore.commands.plugins.listing import READY, Row, rows
from ddlcore.commands.plugins.package import KINDS, write_package
from ddlcore.commands.plugins.trials import FAILED, tried
from ddlcore.plug.settings import settings_of
from ddlcore.text.columns import table


@click.group(
    invoke_without_command=True,
    epilog=examples(
        ("ddl plugins --probe", "try each plugin"),
        ("ddl plugins new transport mine", "a package to begin with"),
    ),
)
@click.option("--probe", is_flag=True, help="Use each plugin once, with three elements.")
@click.option("--json", "for_machines", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def plugins(ctx: click.Context, probe: bool, for_machines: bool) -> int | None:
    """List what is installed at each extension point, its state and the reason.

    DDL_PLUGINS names the only plugins to load, and DDL_PLUGINS_OFF names plugins not to load. The built-in plugins are
    always loaded. With --probe, the exit code is 1 if a plugin failed.
    """
    if ctx.invoked_subcommand is not None:
        return None
    try:
        registry = settings_of(os.environ)[1]
    except ValueError as error:
        raise click.ClickException(f"ddl plugins: {error}") from None
    found = rows(registry)
    if probe:
        found = _probed(found)
    if for_machines:
        whole = {"plugins": [row.facts() for row in found], "problems": registry.problems}
        click.echo(json.dumps(whole, indent=2))
    else:
        click.echo("\n".join([*table([row.facts() for row in found]), *_problems(registry.problems, found)]))
    return int(any(row.state == FAILED for row in found))


def _problems(problems: Sequence[str], found: Sequence[Row]) -> list[str]:
    """Return the problems that no row of ``found`` shows, as lines after an empty line; [] if there are none."""
    rest = [problem for problem in problems if not any(row.reason and row.reason in problem for row in found)]
    return ["", *rest] if rest else []


def _probed(found: Sequence[Row]) -> list[Row]:
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


@plugins.command(cls=Command)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
@click.option(
    "--into", default=".", metavar="DIR", shell_complete=directories, help="Where to create its folder. [default: here]"
)
def new(kind: str, name: str, into: str) -> None:
    """Write a package for a new plugin: KIND is what it adds, NAME is what users will call it.

    The folder ./ddl-NAME can then be installed with pip. Its tests fail only for methods that are still to be written.
    """
    try:
        folder = write_package(kind, name, Path(into))
    except ValueError as error:
        raise click.ClickException(f"ddl plugins new: {error}") from None
    click.echo(f"{folder}: a {kind} called {name}")
    where = os.path.join(".", folder)  # pip may look up a bare name in a package index
    click.echo(f"next: pip install -e {where} && ddl conform {name}")
