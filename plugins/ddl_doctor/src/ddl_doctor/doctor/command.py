"""Implement ``ddl doctor``: read its command line, run the examination, and show the report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from ddl_doctor.doctor.examining import examine, examine_recorded
from ddl_doctor.doctor.report import DoctorReport, text_lines
from ddl_doctor.doctor.subject import Question, subject_of
from ddlcore.commands.completion import directories, files, script
from ddlcore.commands.help import CORE, Group, examples, option
from ddlcore.commands.options import SettingsCommand, setting_options
from ddlcore.errors import DdlInternalError, PluginError, RankFailed
from ddlcore.launch.ranks.command import ranks_path, resolve_command
from ddlcore.launch.ranks.exit_status import NotStarted

_REPORT = Group("Examination", "what is measured, and how it is reported")


@click.command(
    cls=SettingsCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog=examples(
        ("ddl doctor", "this host"),
        ("ddl doctor -H node1:4,node2:4 --plot links.png", "two hosts and the links between them"),
        ("ddl doctor -np 4 -- python train.py", "what the steps of a script wait for"),
    ),
)
@option(
    "-np",
    "--num-proc",
    type=int,
    metavar="N",
    group=CORE["job"],
    brief="How many ranks. [default: all slots]",
    help="How many ranks. [default: all slots of the hosts; without hosts one per GPU, at least 2]",
)
@option(
    "-H",
    "--hosts",
    metavar="HOST:SLOTS,…",
    group=CORE["hosts"],
    brief="The hosts, and the most ranks on each.",
    help="The hosts, and the largest number of ranks on each. [default: here]",
)
@option(
    "--hostfile",
    metavar="FILE",
    shell_complete=files,
    group=CORE["hosts"],
    brief="The same as a file: lines of HOST slots=N.",
    help="The same as a file: lines of the form HOST slots=N.",
)
@option("--json", "as_json", is_flag=True, group=_REPORT, brief="Print the report as JSON.")
@option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group=_REPORT,
    brief="Also draw the matrices, to a .png, .svg or .pdf.",
)
@option(
    "--model-mb",
    type=click.FloatRange(min=0, min_open=True),
    default=100.0,
    metavar="N",
    group=_REPORT,
    brief="Size of a step's gradients in 10⁶ bytes. [default 100]",
    help="Size of a step's gradients in 10⁶ bytes, to say what a slow link costs. [default 100]",
)
@option(
    "--links/--no-links",
    default=True,
    group=_REPORT,
    brief="Measure the links between ranks. [default --links]",
    help="Measure latency and bandwidth between ranks, or do not. [default --links]",
)
@option(
    "--steps",
    type=click.IntRange(min=3),
    default=30,
    metavar="N",
    group=_REPORT,
    brief="With COMMAND: how many of its steps to watch. [default 30]",
)
@option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    metavar="N",
    group=_REPORT,
    brief="With COMMAND: how long to wait for these steps. [default 120]",
)
@option(
    "--root",
    metavar="DIR",
    shell_complete=directories,
    group=_REPORT,
    help="Examine a recorded host, whose proc/, sys/ and gpus.json are in DIR.",
)
@setting_options(in_brief=("hosts",))
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=script)
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    as_json: bool,
    plot: Path | None,
    model_mb: float,
    links: bool,
    steps: int,
    seconds: float,
    root: str | None,
    command: tuple[str, ...],
    **flags: object,
) -> None:
    """Examine hosts, GPUs and networks, and say what is wrong, what it means and what to do.

    With COMMAND, such as `ddl doctor -- python train.py`, ddl also watches some steps of the training and reports which
    share of a step the ranks wait for input. The exit code is 1 if a problem was found, else 0.
    """
    try:
        _check_plot(plot)
        if root is not None and (hosts or hostfile or command):
            raise ValueError("--root looks at a recorded host: it takes no -H, no --hostfile and no command")
        program = (
            tuple(resolve_command(command, path=ranks_path(os.environ.get("PATH", os.defpath)))) if command else ()
        )
        question = Question(links, model_mb, program, command, steps, seconds)
        subject = subject_of(num_proc, hosts, hostfile, flags, os.environ)
        with _telling(sys.stderr.isatty()) as tell:
            report = examine_recorded(root, subject, question) if root is not None else examine(subject, question, tell)
    except (ValueError, PluginError, DdlInternalError, RankFailed, NotStarted, OSError) as error:
        raise click.ClickException(f"ddl doctor: {error}") from None
    _show(report, as_json, plot)
    ctx.exit(report.code)


def _show(report: DoctorReport, as_json: bool, plot: Path | None) -> None:
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    elif sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from ddl_doctor.doctor.drawn import print_report

        print_report(report)
    else:
        click.echo("\n".join(text_lines(report)))
    if plot is not None and report.matrices:
        from ddl_doctor.doctor.heatmap import draw

        try:
            draw(plot, report.matrices, report.title)
        except OSError as error:  # the report was shown: only the picture is missing
            raise click.ClickException(f"ddl doctor: --plot {plot}: {error.strerror}; choose another FILE") from None
        click.echo(f"heat maps: {plot}", err=as_json)
    elif plot is not None:
        click.echo(f"heat maps: none, there is no pair to draw; {plot} was not written", err=True)


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if not plot.parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no directory {plot.parent}; make it first")
    from ddl_doctor.bench.chart import require_matplotlib

    require_matplotlib(plot)


@contextlib.contextmanager
def _telling(on_terminal: bool) -> Iterator[Callable[[str], object]]:
    """Yield a function that takes a text about the present activity.

    If ``on_terminal`` is true, the function shows the text in a status line on standard error, else it does nothing.
    """
    if not on_terminal:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("ddl doctor") as status:
        yield lambda text: status.update(Text(f"ddl doctor: {text}"))
