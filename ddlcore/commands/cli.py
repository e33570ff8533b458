"""The ``ddl`` command: find and run the subcommand.

An error before anything is started is reported as one line, with exit code 2.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ddlcore.commands.help import HELP_NAMES, examples
from ddlcore.text.nearest import nearest

if TYPE_CHECKING:
    from ddlcore.plug.registry import Registry

REFUSED = 2  # exit code when nothing was started
_COMMANDS = (
    "run",
    "info",
    "bench",
    "tune",
    "timeline",
    "doctor",
    "plugins",
    "conform",
)  # each a folder beside this file


class _Commands(click.Group):
    """A click group of ddl's own commands, followed by the commands of plugins.

    The module of a command is imported only when the command is called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *sorted(set(_registry().commands) - set(_COMMANDS))]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = nearest(args[0], self.list_commands(ctx), like=0.6)  # low: one letter is much of a short word
            if not near:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}; did you mean '{near}'?", ctx) from None

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in _COMMANDS:
            command = getattr(importlib.import_module(f"ddlcore.commands.{name}.command"), name)
            assert isinstance(command, click.Command)
            return command
        registry = _registry()
        for provider in registry.commands.values():
            if name in (provider.name, *provider.aliases):
                return registry.load(provider)
        return None


def _registry() -> Registry:
    from ddlcore.plug.settings import settings_of

    return settings_of(os.environ)[1]


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from ddlcore.job import VERSION

        click.echo(f"ddl {VERSION}")
        ctx.exit()


# Both context settings are valid for the subcommands, too: click takes them from the context of the parent command.
@click.group(
    cls=_Commands,
    context_settings={"help_option_names": HELP_NAMES, "max_content_width": 100},
    epilog=examples(
        ("ddl info", "what is installed, and what is missing"),
        ("ddl run -np 4 python train.py", "4 ranks on this host"),
        ("ddl run --help", "the options of a command"),
    ),
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def _ddl() -> None:
    """Data-parallel training on many processes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ddl`` with ``arguments`` and return its exit code. If they are None, use the arguments of this process."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # a notebook's stream has none
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # as stderr does: a path may hold bytes that cannot be decoded
    format_warning = warnings.formatwarning
    warnings.formatwarning = _line  # users of a command do not look for its source
    try:
        return _main(arguments)
    finally:
        warnings.formatwarning = format_warning


def _line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    return f"ddl: {message}\n"


def _main(arguments: Sequence[str] | None) -> int:
    try:
        code = _ddl.main(args=None if arguments is None else list(arguments), prog_name="ddl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        return _refuse(error.format_message())
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "ddl"
        return _refuse(f"{where}: {error.format_message()} (`{where} {_whole_help(error.ctx)}` lists what there is)")
    except click.ClickException as error:
        return _refuse(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # `ddl info | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _whole_help(ctx: click.Context | None) -> str:
    """Return the option that shows all options of the command: "--help-all" if the command has it, else "--help"."""
    shown = [name for one in ctx.command.params for name in one.opts] if ctx else []
    return "--help-all" if "--help-all" in shown else "--help"


def _refuse(text: str) -> int:
    click.echo(text, err=True)
    return REFUSED
