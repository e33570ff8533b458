"""Find the commands that plugins add to ``ddl``, and those below one of its commands.

The provider of the command ``ddl plugins new`` is called "plugins new". A command whose package is known and not
installed is answered by the line that installs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ddlcore.errors import PluginError
from ddlcore.plug.aliases import ALIASES
from ddlcore.text.nearest import nearest

if TYPE_CHECKING:
    from ddlcore.plug.registry import Registry


def loaded() -> Registry:
    """Return the registry of the installed plugins.

    If a variable ``DDL_*`` has an invalid value, the variables are not read: the command says what is wrong with them.
    """
    from ddlcore.plug.settings import settings_of

    try:
        return settings_of(os.environ)[1]
    except ValueError:
        return settings_of({})[1]


class ProvidedGroup(click.Group):
    """A click group whose commands plugins provide. A command's module is imported only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the installed commands of this group."""
        return sorted(_below(ctx, loaded().commands))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command called ``name``, or None.

        A command that cannot be loaded is shown with the reason, and says it when it is called: the others must work.
        Raises ClickException if a package that is not installed has the command, with the line that installs it, or if
        a plugin of this name is off or refused.
        """
        registry = loaded()
        whole = _prefix(ctx) + name
        for provider in registry.commands.values():
            if whole in (provider.name, *provider.aliases):
                try:
                    return registry.load(provider)
                except PluginError as error:
                    return _Broken(name, f"ddl {whole}: {error}")
        if whole in ALIASES["command"]:
            try:
                registry.named(type(registry).commands, whole)  # says how to install it
            except PluginError as error:
                raise click.ClickException(f"ddl {whole}: {error}") from None
        if reason := registry.left_out(whole):
            raise click.ClickException(f"ddl {whole}: there is no such command{reason}")
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that ``args`` name; the error for a wrong name says which one is meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # A low limit: one letter is much of a short word.
            near = nearest(args[0], {*self.list_commands(ctx), *_below(ctx, ALIASES["command"])}, like=0.6)
            if not near:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}; did you mean '{near}'?", ctx) from None


class _Broken(click.Command):
    """Stands for a command that cannot be loaded, and says why when it is called, whatever its arguments are."""

    def __init__(self, name: str, reason: str) -> None:
        passes = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(name, context_settings=passes, add_help_option=False, short_help=f"(broken) {reason}")
        self._reason = reason

    def invoke(self, ctx: click.Context) -> None:
        raise click.ClickException(self._reason)


def _prefix(ctx: click.Context) -> str:
    """Return what the names of the commands below the command of ``ctx`` begin with, such as "plugins "; "" for ddl."""
    above = ctx.command_path.split(" ")[1:]
    return "".join(f"{word} " for word in above)


def _below(ctx: click.Context, names: Iterable[str]) -> list[str]:
    prefix = _prefix(ctx)
    return [rest for name in names if name.startswith(prefix) and " " not in (rest := name[len(prefix) :])]
