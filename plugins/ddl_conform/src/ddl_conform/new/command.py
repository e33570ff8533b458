"""Implement ``ddl plugins new``: read its command line, write the package, and say what comes next."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ddl_conform.new.package import KINDS, write_package
from ddlcore.commands.completion import directories
from ddlcore.commands.help import Command


@click.command(cls=Command)
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
