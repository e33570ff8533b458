"""Implement ``ddl conform``: find the plugin, run its suites one after the other, and print the results."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ddl_conform.conform.kinds import KINDS, ProviderUnderTest, subjects
from ddl_conform.conform.report import as_json, as_text, succeeded
from ddl_conform.conform.watch import ConformRun
from ddl_conform.conform.watch import conform as run_suite
from ddl_conform.quick.probing import probed
from ddl_conform.quick.trials import FAILED
from ddlcore.commands.completion import installed, items
from ddlcore.commands.help import Command, examples
from ddlcore.commands.plugins.listing import rows, shown
from ddlcore.errors import PluginError
from ddlcore.plug.settings import settings_of
from ddlcore.text.installing import pip_install

if TYPE_CHECKING:
    from ddlcore.commands.completion import Items

NEEDED = ("pytest", "hypothesis", "ml_dtypes")
TEST_S = 60.0


def _testable(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Return completions: names of plugins that have a conformance suite, and names of their distributions."""
    registry = installed()
    if registry is None:
        return []
    tested = [one for row in KINDS.values() for one in registry.of(row.kind()).values()]
    docs = {one.name: one.doc for one in tested}
    return items({**dict.fromkeys((registry.distribution(one).name for one in tested), ""), **docs}, incomplete)


@click.command(
    cls=Command,
    epilog=examples(
        ("ddl conform shm", "all suites for what is called shm"),
        ("ddl conform ddl-example", "everything that a distribution offers"),
        ("ddl conform --quick", "use everything that is installed once"),
    ),
)
@click.argument("name", required=False, shell_complete=_testable)
@click.option(
    "--quick",
    is_flag=True,
    help="Only use each plugin once, with three elements; without NAME, each that is installed.",
)
@click.option("--kind", "kind", type=click.Choice(list(KINDS)), help="The plugin's kind, if several have this name.")
@click.option("--only", multiple=True, metavar="TEST", help="Run only this test; may be given several times.")
@click.option(
    "--test-timeout", default=TEST_S, show_default=True, metavar="SECONDS", help="How long one test may take."
)
@click.option("--json", "for_machines", is_flag=True, help="Print the results as JSON.")
def conform(
    name: str | None, quick: bool, kind: str | None, only: tuple[str, ...], test_timeout: float, for_machines: bool
) -> int:
    """Run the conformance kit on an installed plugin.

    NAME is the plugin's name, such as shm, or the name of its distribution. Exit code: 0 if everything passed, 1 if
    something failed or a method is still to be written, 2 if nothing could run.
    """
    if quick:
        return _quick(name, for_machines)
    if name is None:
        raise click.UsageError("Missing argument 'NAME'.", click.get_current_context())
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        install = pip_install("ddl-conform")
        raise click.ClickException(f"ddl conform: {', '.join(missing)} not installed; {install}")
    try:
        registry = settings_of(os.environ)[1]
        found = subjects(registry, name, kind or "")
        for subject in found:
            if subject.missing and not subject.provider.suite_over:
                raise PluginError(f"{subject} cannot be used: {subject.missing}")
    except (PluginError, ValueError) as error:
        raise click.ClickException(f"ddl conform: {error}") from None
    runs = []
    for subject in found:
        runs.append(_run(subject, only, test_timeout))
        if not for_machines:
            click.echo(as_text(runs[-1], bool(only)) + ("\n" if subject is not found[-1] else ""))
    if for_machines:
        click.echo(json.dumps([as_json(run, bool(only)) for run in runs], indent=2))
    if any(run.refused or not run.results for run in runs):
        return _nothing(runs, only)
    return 0 if all(map(succeeded, runs)) else 1


def _quick(name: str | None, for_machines: bool) -> int:
    """Use each plugin once, show the list with the results, and return the exit code: 1 if a plugin has failed."""
    try:
        registry = settings_of(os.environ)[1]
    except ValueError as error:
        raise click.ClickException(f"ddl conform: {error}") from None
    found = [row for row in rows(registry) if name in (None, row.name, row.distribution)]
    if not found:
        raise click.ClickException(f"ddl conform: nothing is called '{name}' (`ddl plugins` shows all)")
    found = probed(found)
    click.echo(shown(registry, found, for_machines=for_machines))
    return int(any(row.state == FAILED for row in found))


def _nothing(runs: list[ConformRun], only: tuple[str, ...]) -> int:
    if not any(run.refused for run in runs):
        click.echo(f"ddl conform: no test is called {' or '.join(only)}", err=True)
    return 2


def _run(subject: ProviderUnderTest, only: tuple[str, ...], test_s: float) -> ConformRun:
    with _progress(str(subject)) as told:
        return run_suite(subject, test_s=test_s, only=only, told=told)


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """Show a progress line while a suite runs, if standard error is a terminal.

    Yield the function that updates the progress line. Its arguments are the number of tests that have ended, the number
    of all tests, and the name of the test that runs now.
    """
    if not sys.stderr.isatty():
        yield lambda done, all_, name: None
        return
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

    with Status(Text(title), console=Console(stderr=True)) as status:
        yield lambda done, all_, name: status.update(Text(f"{title}: {done} of {all_}, {name}"))
