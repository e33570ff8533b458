"""``ddl run``: reads its command line, refuses what cannot work, and hands the rest to the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from ddlcore.config import Settings, read_toml
from ddlcore.errors import DdlInternalError, PluginError
from ddlcore.job import VERSION
from ddlcore.launch.command import own_script, ranks_path, resolve_command
from ddlcore.launch.environment import master_port, wanted_port
from ddlcore.launch.horovod import Answers, answers_of, horovod_options, log_level, read_variables
from ddlcore.launch.hosts import Layout
from ddlcore.launch.launcher import Launch, check_route, prepare_directory, run_job
from ddlcore.launch.options import setting_options
from ddlcore.launch.placing import Placed, place
from ddlcore.launch.verdict import NotStarted
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of

__all__ = ["run"]

_HELP = ("-h", "--help")


class _RunCommand(click.Command):
    """Everything from the first word that is no option belongs to the command of the ranks, ``-m`` included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._mark_command(args))

    def _mark_command(self, args: list[str]) -> list[str]:
        words = {
            name: 0 if option.is_flag else option.nargs
            for option in self.params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                return [*args[:at], "--", *args[at:]]
            at += 1 if "=" in args[at] or args[at] in _HELP else 1 + words.get(args[at], 1)
        return args


@click.command(
    cls=_RunCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": list(_HELP), "max_content_width": 110},
    options_metavar="-np N [OPTIONS]",
)
@click.option("-np", "--num-proc", type=int, metavar="N", help="How many ranks to start.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,…", help="Where, and how many on each at most.")
@click.option("--hostfile", "-hostfile", metavar="FILE", help="The same as a file: lines of the form HOST slots=N.")
@click.option("-p", "--ssh-port", metavar="N", help="Port of every other host's sshd. [DDL_SSH_PORT]")
@click.option("-i", "--ssh-identity-file", metavar="FILE", help="Private key for ssh. [DDL_SSH_IDENTITY_FILE]")
@click.option("--dry-run", is_flag=True, help="Show ranks, environment and commands, and start nothing.")
@click.option(
    "--config", "--config-file", metavar="FILE", help="TOML file with settings; flags and DDL_* variables win over it."
)
@click.option(
    "--output-dir", "--output-filename", metavar="DIR", help="Also write DIR/rank.N/stdout and DIR/rank.N/stderr."
)
@click.option(
    "--prefix-output-with-timestamp",
    "-prefix-timestamp",
    "stamped",
    is_flag=True,
    help="Put the time before every line of output.",
)
@click.option("--verbose", is_flag=True, help="Say what is started, where, and with which settings.")
@click.option("--check-build", "-cb", is_flag=True, help="Show `ddl info` and exit.")
@click.option("-v", "--version", is_flag=True, help="Show the version and exit.")
@setting_options
@horovod_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    dry_run: bool,
    config: str | None,
    output_dir: str | None,
    stamped: bool,
    verbose: bool,
    check_build: bool,
    version: bool,
    command: tuple[str, ...],
    **flags: object,
) -> None:
    """Start COMMAND on N ranks, such as: ddl run -np 4 python train.py --epochs 3

    COMMAND is `python SCRIPT …`, `SCRIPT.py …`, `-m MODULE …` or any program. The exit code is that of
    the first rank that fails. Every flag of horovodrun is taken, or answered by what to use instead.
    """
    if version:
        click.echo(f"ddl {VERSION}")
        return
    if check_build:
        from ddlcore.launch.info import info

        ctx.invoke(info)
        return
    try:
        given = _answers(ctx)
        environ = {**os.environ, **given.environ}
        settings, registry = _settings(flags, given, config)
        placed = place(num_proc, hosts, hostfile, settings, registry, environ)
        launch = Launch(
            command=tuple(resolve_command(command, path=ranks_path(environ.get("PATH", os.defpath)))),
            layout=placed.layout,
            settings=settings,
            registry=registry,
            environ=environ,
            port=_port(placed, environ),
            across=placed.across,
            needs=own_script(command),
            output_dir=Path(output_dir) if output_dir else None,
            stamped=stamped,
            verbose=verbose,
        )
        check_route(settings.text("backend"), launch.layout.ranks, registry, placed.launcher)
        registry.load(registry.fusion_policy(settings.text("fusion_policy")))
        if dry_run:
            from ddlcore.launch.dry import describe

            click.echo("\n".join(describe(launch)))
            return
        if launch.output_dir is not None:
            prepare_directory(launch.output_dir, launch.size)
    except (ValueError, PluginError, DdlInternalError, OSError) as error:
        raise click.ClickException(f"ddl run: {error}") from None
    for note in given.notes:
        click.echo(f"ddl run: {note}", err=True)
    try:
        ctx.exit(run_job(launch))
    except NotStarted as error:
        click.echo(f"ddl run: {error}", err=True)
        ctx.exit(error.code)


def _answers(ctx: click.Context) -> Answers:
    """What flags and variables of Horovod's come to; a flag wins over a variable."""
    flags, variables = answers_of(ctx), read_variables(os.environ)
    return Answers(
        settings={**variables.settings, **flags.settings},
        environ={**variables.environ, **flags.environ},
        notes=[*variables.notes, *variables.refusals, *flags.notes],
    )


def _settings(flags: Mapping[str, object], given: Answers, config: str | None) -> tuple[Settings, Registry]:
    """Our own flags and variables win over Horovod's."""
    own = {name: value for name, value in flags.items() if value is not None}
    if "log_level" in own:
        own["log_level"] = log_level(str(own["log_level"]))
    foreign = {name: value for name, value in given.settings.items() if f"DDL_{name.upper()}" not in os.environ}
    return settings_of(os.environ, {**foreign, **own}, read_toml(config) if config else None)


def _port(placed: Placed, environ: Mapping[str, str]) -> int:
    layout: Layout = placed.layout
    return master_port(environ) if layout.ranks[0] == layout.here else wanted_port(environ)
