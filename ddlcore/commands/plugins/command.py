"""Implement ``ddl plugins``: show the table of plugins. Its subcommands come from other packages."""

from __future__ import annotations

import os

import click

from ddlcore.commands.help import examples
from ddlcore.commands.plugins.listing import shown
from ddlcore.commands.provided import ProvidedGroup
from ddlcore.plug.settings import settings_of


@click.group(
    cls=ProvidedGroup,
    invoke_without_command=True,
    epilog=examples(
        ("ddl plugins", "what is installed"),
        ("ddl plugins new transport mine", "a package to begin with"),
        ("ddl conform --quick", "try each plugin"),
    ),
)
@click.option("--json", "for_machines", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def plugins(ctx: click.Context, for_machines: bool) -> None:
    """List what is installed at each extension point, its state and the reason.

    DDL_PLUGINS names the only plugins to load, and DDL_PLUGINS_OFF names plugins not to load. The built-in plugins are
    always loaded.
    """
    if ctx.invoked_subcommand is not None:
        return
    try:
        registry = settings_of(os.environ)[1]
    except ValueError as error:
        raise click.ClickException(f"ddl plugins: {error}") from None
    click.echo(shown(registry, for_machines=for_machines))
