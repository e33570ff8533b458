"""Implement ``ddl run``: read and check its command line, and let the launcher start the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ddlcore.commands.completion import directories, files, script
from ddlcore.commands.help import CORE, HELP, Option, examples, option
from ddlcore.commands.options import SettingsCommand, setting_options
from ddlcore.commands.run.horovod import answers_of, horovod_options
from ddlcore.config.file import read_toml
from ddlcore.config.loading import Settings
from ddlcore.config.setting import GROUPS
from ddlcore.errors import DdlInternalError, PluginError
from ddlcore.launch.job.horovod import Answers, log_level, read_variables
from ddlcore.launch.job.launcher import JobDescription, check_route, prepare_directory, run_job
from ddlcore.launch.job.local_ranks import chosen_port
from ddlcore.launch.job.placement import check_elastic, find_discovery, place_ranks
from ddlcore.launch.job.watch import check_watches
from ddlcore.launch.ranks.command import own_script, ranks_path, resolve_command
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.observers import check_observers
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
    decorators: tuple[_Decorator, ...] = (*_OPTIONS, setting_options(in_brief), horovod_options, command)

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
    the first rank that fails. Every flag of horovodrun is accepted or explained.
    """
    if version:
        click.echo(f"ddl {VERSION}")
        return
    if check_build:
        from ddlcore.commands.info.command import info

        ctx.invoke(info)
        return
    try:
        launch, notes = prepare(ctx, dry_run=dry_run, **given)
        if dry_run:
            from ddlcore.commands.run.dry import describe

            click.echo("\n".join(describe(launch)))
            return
        if launch.settings["autotune"]:
            from ddlcore.commands.run.autotune import while_training

            launch = while_training(launch)
        if launch.output_dir is not None:
            prepare_directory(launch.output_dir, launch.size)
    except (ValueError, PluginError, DdlInternalError, OSError) as error:
        raise click.ClickException(f"ddl run: {error}") from None
    for note in notes:
        click.echo(f"ddl run: {note}", err=True)
    try:
        code = run_job(launch)
        if launch.settings["autotune"]:
            from ddlcore.commands.run.autotune import after_training

            after_training(launch)
        ctx.exit(code)
    except NotStarted as error:
        click.echo(f"ddl run: {error}", err=True)
        ctx.exit(error.code)


def prepare(
    ctx: click.Context,
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
) -> tuple[JobDescription, list[str]]:
    """Check the values of the options. Return the description of the launch, and notes to show to the user.

    The parameters are the options of ``job_options``; ``dry_run`` is an option of ``ddl run`` alone. Raises ValueError,
    PluginError, DdlInternalError or OSError, with a message of one line, if the launch cannot work.
    """
    given = _answers(ctx)
    environ = {**os.environ, **given.environ}
    settings, registry = _settings(flags, given, config)
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
    check_watches(settings, registry)
    check_observers(settings, registry, placed.layout.here >= 0 and not dry_run)
    registry.load(registry.named(Registry.fusion_policies, settings.text("fusion_policy")))
    registry.named(Registry.compressors, settings.text("compression"))
    if settings.text("tuner") != "auto":
        registry.named(Registry.tuners, settings.text("tuner"))
    return launch, given.notes


def _answers(ctx: click.Context) -> Answers:
    """Translate the flags and environment variables of Horovod. Return ddl's settings and variables, and notes to show.

    A flag takes precedence over a variable.
    """
    flags, variables = answers_of(ctx), read_variables(os.environ)
    return Answers(
        settings={**variables.settings, **flags.settings},
        environ={**variables.environ, **flags.environ},
        notes=[*variables.notes, *variables.refusals, *flags.notes],
    )


def _settings(flags: Mapping[str, object], given: Answers, config: str | None) -> tuple[Settings, Registry]:
    """Return the settings and the registry of plugins.

    ``flags`` holds ddl's own flags (None: not given), ``given`` holds the settings that result from the flags and
    variables of Horovod, and ``config`` is the path of a config file or None. ddl's own flags and variables take
    precedence over those of Horovod.
    """
    own = {name: value for name, value in flags.items() if value is not None}
    if "log_level" in own:
        own["log_level"] = log_level(str(own["log_level"]))
    foreign = {name: value for name, value in given.settings.items() if f"DDL_{name.upper()}" not in os.environ}
    return settings_of(os.environ, {**foreign, **own}, read_toml(config) if config else None)
