"""Implements horovodrun: ``ddl run`` with all flags of Horovod's launcher, for scripts that import horovod."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import click

from ddl_horovod.config_file import flags_in
from ddl_horovod.options import answers_of, horovod_options
from ddl_horovod.original import refuse_original
from ddl_horovod.tables import Answers, log_level, read_config
from ddl_horovod.variables import rank_variables, with_ddl_variables
from ddlcore.api import built
from ddlcore.commands.cli import run_program
from ddlcore.commands.help import CORE, HELP, examples, option
from ddlcore.commands.run.command import JobCommand, job_options, start

RELEASE = "0.28.1"  # the release of Horovod whose flags, names and signatures these are
_FRAMEWORKS = (
    ("TensorFlow", "tensorflow", "ddl_tf"),
    ("PyTorch", "torch", "ddl_torch"),
    ("MXNet", "mxnet", "ddl_mxnet"),
)
_ROWS = (("Controllers", ("MPI", "Gloo")), ("Tensor Operations", ("NCCL", "DDL", "CCL", "MPI", "Gloo")))
_TRANSPORTS = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl", "CCL": "ccl", "DDL": "ibm-ddl"}


@click.command(
    "horovodrun",
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
    options_metavar="-np N [OPTIONS]",
    epilog=examples(
        ("horovodrun -np 4 python train.py", "4 ranks on this host"),
        ("horovodrun -np 8 -H node1:4,node2:4 python train.py", "8 ranks on two hosts"),
    ),
)
@job_options()
@horovod_options
@option("--dry-run", is_flag=True, group=CORE["job"], brief="Show what would be started, and start nothing.")
@option(
    "--check-build", "-cb", is_flag=True, group=HELP, brief="Show which frameworks and transports there are, and exit."
)
@option("-v", "--version", is_flag=True, group=HELP, brief="Show the release of Horovod that this is like, and exit.")
@click.pass_context
def horovodrun(ctx: click.Context, /, dry_run: bool, check_build: bool, version: bool, **given: Any) -> None:
    """Start COMMAND on N ranks, such as: horovodrun -np 4 python train.py

    COMMAND is a script that imports horovod.torch, for example. It runs on ddl. Every flag of Horovod's launcher is
    accepted or explained, and every flag of `ddl run` is accepted, too.
    """
    if version:
        click.echo(RELEASE)
        return
    if check_build:
        click.echo("\n".join(_build()))
        return
    try:
        refuse_original()
        environ, notes = with_ddl_variables(os.environ)
        answers = _answers(given)
        flags = answers_of(ctx)
    except (ImportError, ValueError) as error:
        raise click.ClickException(f"horovodrun: {error}") from None
    for note in (*notes, *answers.notes, *flags.notes):
        click.echo(f"horovodrun: {note}", err=True)
    asked = {**answers.settings, **flags.settings}
    given = {**asked, **{name: asked.get(name) if value is None else value for name, value in given.items()}}
    if given.get("min_np") is None and (given.get("host_discovery_script") or given.get("max_np")):
        given["min_np"] = given["num_proc"]  # an elastic job, as in Horovod
    environ |= {**answers.environ, **flags.environ, "DDL_RANK_VARIABLES": rank_variables(environ)}
    start(ctx, environ, dry_run, **given)


def _answers(given: dict[str, Any]) -> Answers:
    """Return what a config file in YAML asks for, and take it out of ``given``. Convert the names of log levels.

    Raises ValueError, with a message of one line, for a bad value.
    """
    if given.get("log_level") is not None:
        given["log_level"] = log_level(given["log_level"])
    path = given.get("config")
    if path is None or not path.endswith((".yaml", ".yml")):
        return Answers()  # a file of ddl's own, which ``start`` reads
    given["config"] = None
    return read_config(flags_in(path))


def _build() -> list[str]:
    """Return the lines of ``--check-build``: frameworks with their packages, and transports."""
    lines = [f"Horovod v{RELEASE}, by ddl-horovod:", "", "Available Frameworks:"]
    lines += [_line(name, all(map(find_spec, modules))) for name, *modules in _FRAMEWORKS]
    for title, names in _ROWS:
        lines += ["", f"Available {title}:", *(_line(name, built(_TRANSPORTS[name])) for name in names)]
    return lines


def _line(name: str, there: bool) -> str:
    return f"    [{'X' if there else ' '}] {name}"


def main() -> None:
    """Run horovodrun with the arguments of this process, and exit with its exit code."""
    sys.exit(run_program(horovodrun, "horovodrun"))
