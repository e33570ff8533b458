"""``ddl run``: reads its command line, refuses what cannot work, and hands the rest to the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ddlcore.config import read_toml
from ddlcore.errors import DdlInternalError, PluginError
from ddlcore.job import settings_of
from ddlcore.launch.command import ranks_path, resolve_command
from ddlcore.launch.environment import master_port
from ddlcore.launch.hosts import place
from ddlcore.launch.launcher import Launch, NotStarted, check_route, prepare_directory, run_job
from ddlcore.launch.options import setting_options

__all__ = ["run"]

_HELP = ("-h", "--help")


class _RunCommand(click.Command):
    """Everything from the first word that is no option belongs to the command of the ranks, ``-m`` included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._mark_command(args))

    def _mark_command(self, args: list[str]) -> list[str]:
        flags = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.is_flag
            for name in option.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                return [*args[:at], "--", *args[at:]]
            alone = args[at] in flags or "=" in args[at] or args[at] in _HELP
            at += 1 if alone else 2
        return args


@click.command(
    cls=_RunCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": list(_HELP), "max_content_width": 110},
    options_metavar="-np N [OPTIONS]",
)
@click.option("-np", "--num-proc", type=int, metavar="N", help="How many ranks to start.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS", help="Where, and how many at most; this release serves localhost.")
@click.option(
    "--config", "--config-file", metavar="FILE", help="TOML file with settings; flags and DDL_* variables win over it."
)
@click.option(
    "--output-dir", "--output-filename", metavar="DIR", help="Also write DIR/rank.N/stdout and DIR/rank.N/stderr."
)
@click.option(
    "--prefix-output-with-timestamp", "stamped", is_flag=True, help="Put the time before every line of output."
)
@click.option("--verbose", is_flag=True, help="Say what is started, where, and with which settings.")
@click.option("--check-build", is_flag=True, help="Show `ddl info` and exit.")
@setting_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    num_proc: int | None,
    hosts: str | None,
    config: str | None,
    output_dir: str | None,
    stamped: bool,
    verbose: bool,
    check_build: bool,
    command: tuple[str, ...],
    **flags: object,
) -> None:
    """Start COMMAND on N ranks, such as: ddl run -np 4 python train.py --epochs 3

    COMMAND is `python SCRIPT …`, `SCRIPT.py …`, `-m MODULE …` or any program. The exit code is that of
    the first rank that fails.
    """
    if check_build:
        from ddlcore.launch.info import info

        ctx.invoke(info)
        return
    try:
        placed = place(num_proc, hosts)
        settings, registry = settings_of(os.environ, flags, read_toml(config) if config else None)
        launch = Launch(
            command=tuple(resolve_command(command, path=ranks_path(os.environ.get("PATH", os.defpath)))),
            hosts=placed,
            settings=settings,
            registry=registry,
            environ=os.environ,
            port=master_port(os.environ),
            output_dir=Path(output_dir) if output_dir else None,
            stamped=stamped,
            verbose=verbose,
        )
        check_route(settings.text("backend"), placed, registry)
        registry.load(registry.fusion_policy(settings.text("fusion_policy")))
        if launch.output_dir is not None:
            prepare_directory(launch.output_dir, launch.size)
    except (ValueError, PluginError, DdlInternalError, OSError) as error:
        raise click.ClickException(f"ddl run: {error}") from None
    try:
        ctx.exit(run_job(launch))
    except NotStarted as error:
        raise click.ClickException(f"ddl run: {error}") from None
