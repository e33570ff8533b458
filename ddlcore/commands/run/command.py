"""Implement ``ddl run``: read and check its command line, and let the launcher start the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from ddlcore.commands.completion import directories, files, script
from ddlcore.commands.help import CORE, HELP, Option, examples, option
from ddlcore.commands.options import SettingsCommand, setting_options
from ddlcore.config.file import read_toml
from ddlcore.config.setting import GROUPS
from ddlcore.errors import DdlInternalError, PluginError
from ddlcore.launch.job.launcher import JobDescription, check_route, prepare_directory, run_job
from ddlcore.launch.job.local_ranks import chosen_port
from ddlcore.launch.job.placement import check_elastic, find_discovery, place_ranks
from ddlcore.launch.job.watch import check_watches
from ddlcore.launch.ranks.command import own_script, ranks_path, resolve_command
from ddlcore.launch.ranks.environment import RankVariables
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.plug.aliases import VARIABLES_OF_OTHERS
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.observers import check_observers
from ddlcore.text.installing import pip_install
from ddlcore.version import VERSION


class JobCommand(SettingsCommand):
    """A command whose options are followed by the command of the ranks, such as ``python train.py``.

    The command of the ranks begins with the first word that is not an option, or with ``-m``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line ``args``: first the options, then the command of the ranks."""
        self.find_plugin_options(ctx, args)  # where the command begins depends on which options take a value
        args = self.with_values(ctx, args)
        at = self.command_at(ctx, args)
        return super().parse_args(ctx, [*args[:at], "--", *args[at:]] if args[at : at + 1] == ["-m"] else args)

    def with_values(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Return ``args`` in which each option that has no value, but may have one, gets the value of the bare option.

        An option has no value if the next word does not have the form of such a value: that word may be the first word
        of the ranks' command.
        """
        found = list(args)
        bare = self._bare_options(ctx)
        for at, word in enumerate(found[: self.command_at(ctx, found)]):
            if word in bare and not any(map(bare[word].is_value, found[at + 1 : at + 2])):
                found[at] = f"{word}={bare[word].bare}"
        return found

    def _bare_options(self, ctx: click.Context) -> dict[str, Option]:
        """Return the options whose value may be left out, by flag."""
        options = [one for one in self.get_params(ctx) if isinstance(one, Option) and one.bare]
        return {flag: one for one in options for flag in one.opts}

    def command_at(self, ctx: click.Context, args: Sequence[str]) -> int:
        """Return the index in ``args`` of the first word after ddl's own options.

        The word after an unknown option counts as the value of that option.
        """
        words = {
            name: 0 if option.is_flag else option.nargs
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        may_be_bare = self._bare_options(ctx)
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("--", "-m"):
            one = may_be_bare.get(args[at])
            bare = one is not None and not any(map(one.is_value, args[at + 1 : at + 2]))
            at += 1 if bare or "=" in args[at] else 1 + words.get(args[at], 1)
        return at


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def job_options(in_brief: Collection[str] = tuple(GROUPS)) -> _Decorator:
    """Return a decorator that adds the options which ``ddl run`` and ``ddl tune`` share.

    The options are those for the hosts, those for the settings, and the command of the ranks. ``in_brief`` holds the
    groups of settings that the short help may show.
    """
    command = click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=script)
    decorators: tuple[_Decorator, ...] = (*_OPTIONS, setting_options(in_brief), command)

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed(decorators):
            function = one(function)
        return function

    return add


_JOB, _HOSTS, _OUTPUT = CORE["job"], CORE["hosts"], CORE["output"]
_OPTIONS: tuple[_Decorator, ...] = (
    option("-np", "--num-proc", type=int, metavar="N", group=_JOB, brief="How many ranks to start."),
    option(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,…",
        group=_HOSTS,
        brief="The hosts, and the most ranks on each.",
        help="The hosts, and the largest number of ranks on each.",
    ),
    option(
        "--hostfile",
        "-hostfile",
        metavar="FILE",
        shell_complete=files,
        group=_HOSTS,
        brief="The same as a file: lines of HOST slots=N.",
        help="The same as a file: lines of the form HOST slots=N.",
    ),
    option(
        "-p",
        "--ssh-port",
        metavar="N",
        group=_HOSTS,
        help="Port of every other host's sshd. [DDL_SSH_PORT]",
    ),
    option(
        "-i",
        "--ssh-identity-file",
        metavar="FILE",
        shell_complete=files,
        group=_HOSTS,
        help="Private key for ssh. [DDL_SSH_IDENTITY_FILE]",
    ),
    option(
        "--config",
        "--config-file",
        metavar="FILE",
        shell_complete=files,
        group=_JOB,
        brief="TOML file with settings.",
        help="TOML file with settings; flags and DDL_* variables take precedence over it.",
    ),
    option(
        "--output-dir",
        "--output-filename",
        metavar="DIR",
        shell_complete=directories,
        group=_OUTPUT,
        brief="Also write each rank's output to files in DIR.",
        help="Also write DIR/rank.N/stdout and DIR/rank.N/stderr.",
    ),
    option(
        "--prefix-output-with-timestamp",
        "-prefix-timestamp",
        "stamped",
        is_flag=True,
        group=_OUTPUT,
        help="Put the time before every line of output.",
    ),
    option(
        "--verbose",
        is_flag=True,
        group=_OUTPUT,
        brief="Show what is started, and with which settings.",
        help="Show what is started, where, and with which settings.",
    ),
)


@click.command(
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="-np N [OPTIONS]",
    epilog=examples(
        ("ddl run -np 4 python train.py", "4 ranks on this host"),
        ("ddl run -H node1:4,node2:4 python train.py", "8 ranks on two hosts"),
        ("ddl run -np 4 --dry-run python train.py", "what would be started"),
        ("ddl run -np 4 -m package.train", "a module"),
    ),
)
@job_options()
@option(
    "--dry-run",
    is_flag=True,
    group=_JOB,
    brief="Show what would be started, and start nothing.",
    help="Show ranks, environment and commands, and start nothing.",
)
@option("--check-build", "-cb", is_flag=True, group=HELP, help="Show `ddl info` and exit.")
@option("-v", "--version", is_flag=True, group=HELP, help="Show the version and exit.")
@click.pass_context
def run(ctx: click.Context, /, dry_run: bool, check_build: bool, version: bool, **given: Any) -> None:
    """Start COMMAND on N ranks, such as: ddl run -np 4 python train.py --epochs 3

    COMMAND is `python SCRIPT …`, `SCRIPT.py …`, `-m MODULE …` or any program. The exit code is that of
    the first rank that fails.
    """
    if version:
        click.echo(f"ddl {VERSION}")
        return
    if check_build:
        from ddlcore.commands.info.command import info

        ctx.invoke(info)
        return
    for note in unread_variables(os.environ):
        click.echo(f"ddl run: {note}", err=True)
    start(ctx, os.environ, dry_run, **given)


def unread_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one line of text for each known kind of variables in ``environ`` that only another command reads."""
    lines = []
    for prefix, (command, plugin) in VARIABLES_OF_OTHERS.items():
        names = sorted(name for name in environ if name.startswith(prefix))
        if names:
            lines.append(f"{', '.join(names)}: not read here. {command} reads such variables: {pip_install(plugin)}")
    return lines


def start(ctx: click.Context, environ: Mapping[str, str], dry_run: bool, **given: Any) -> NoReturn:
    """Start the job that the options of ``job_options``, in ``given``, describe, and end with its exit code.

    ``environ``: the environment of the launcher, which the ranks get. ``dry_run``: only show the job. An error is shown as
    one line that begins with the words of the command line by which ``ctx`` was called, such as "ddl run".
    """
    program = ctx.command_path
    try:
        launch = prepare(environ, dry_run=dry_run, **given)
        if dry_run:
            from ddlcore.commands.run.dry import describe

            click.echo("\n".join(describe(launch)))
            ctx.exit(0)
        if launch.settings["autotune"]:
            from ddlcore.commands.run.autotune import while_training

            launch = while_training(launch)
        if launch.output_dir is not None:
            prepare_directory(launch.output_dir, launch.size)
    except (ValueError, PluginError, DdlInternalError, OSError) as error:
        raise click.ClickException(f"{program}: {error}") from None
    try:
        code = run_job(launch)
        if launch.settings["autotune"]:
            from ddlcore.commands.run.autotune import after_training

            after_training(launch)
        ctx.exit(code)
    except NotStarted as error:
        click.echo(f"{program}: {error}", err=True)
        ctx.exit(error.code)


def prepare(
    environ: Mapping[str, str],
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    config: str | None,
    output_dir: str | None,
    stamped: bool,
    verbose: bool,
    command: tuple[str, ...],
    dry_run: bool = False,
    **flags: object,
) -> JobDescription:
    """Check the values of the options, and return the description of the launch.

    ``environ`` is the environment of the launcher. The other parameters are the options of ``job_options``; ``dry_run``
    is an option of ``ddl run`` alone. Raises ValueError, PluginError, DdlInternalError or OSError, with a message of one
    line, if the launch cannot work.
    """
    settings, registry = settings_of(environ, flags, read_toml(config) if config else None)
    discovery = find_discovery(settings, registry, environ)
    placed = place_ranks(num_proc, hosts, hostfile, settings, registry, environ, discovery)
    launch = JobDescription(
        command=tuple(resolve_command(command, path=ranks_path(environ.get("PATH", os.defpath)))),
        placed=placed,
        settings=settings,
        registry=registry,
        environ=environ,
        port=chosen_port(placed.layout, environ),
        needs=own_script(command),
        output_dir=Path(output_dir) if output_dir else None,
        stamped=stamped,
        verbose=verbose,
    )
    route = check_route(settings.text("backend"), launch.layout.ranks, registry, placed.launcher)
    check_elastic(settings, launch.size, route)
    RankVariables.of(settings)
    check_watches(settings, registry)
    check_observers(settings, registry, placed.layout.here >= 0 and not dry_run)
    registry.load(registry.named(Registry.fusion_policies, settings.text("fusion_policy")))
    registry.named(Registry.compressors, settings.text("compression"))
    if settings.text("tuner") != "auto":
        registry.named(Registry.tuners, settings.text("tuner"))
    return launch
