"""The ``ddl`` command: find and run the subcommand.

An error before anything is started is reported as one line, with exit code 2.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import click

from ddlcore.builtin.plugin import ddl_cli
from ddlcore.commands.help import HELP_NAMES, examples
from ddlcore.commands.provided import ProvidedGroup

REFUSED = 2  # exit code when nothing was started


class _Commands(ProvidedGroup):
    """A click group of the core's own commands, followed by the commands of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = [one.name for one in ddl_cli()]
        return [*own, *(name for name in super().list_commands(ctx) if name not in own)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        for own in ddl_cli():
            if name == own.name:  # without a look at the installed plugins, which takes a while
                module, _, attribute = own.target.partition(":")
                command = getattr(importlib.import_module(module), attribute)
                assert isinstance(command, click.Command)
                return command
        return super().get_command(ctx, name)


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from ddlcore.version import VERSION

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
    return run_program(_ddl, "ddl", arguments)


def run_program(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run ``command`` as the program ``name`` with ``arguments``, and return the exit code.

    An error before anything is started is shown as one line, and the exit code is ``REFUSED``. If ``arguments`` is None,
    use the arguments of this process.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # a notebook's stream has none
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # as stderr does: a path may hold bytes that cannot be decoded
    format_warning = warnings.formatwarning
    warnings.formatwarning = _line  # users of a command do not look for its source
    try:
        return _exit_code(command, name, arguments)
    finally:
        warnings.formatwarning = format_warning


def _line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    return f"ddl: {message}\n"


def _exit_code(command: click.Command, name: str, arguments: Sequence[str] | None) -> int:
    try:
        code = command.main(args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        return _refuse(error.format_message())
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else name
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
