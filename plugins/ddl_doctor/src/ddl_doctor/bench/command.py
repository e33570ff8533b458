"""Implement ``ddl bench``: read its command line, start the ranks, show their results, and write them to files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ddl_doctor.bench.pipe import told
from ddl_doctor.bench.plan import (
    DTYPES,
    OPERATIONS,
    SIZES,
    BenchPlan,
    parse_dtype,
    parse_operations,
    parse_sizes,
)
from ddl_doctor.bench.results import TRANSPORT, WHOLE, MeasuredRow, ratio
from ddl_doctor.bench.tables import closing, heading, line, ranks_and_hosts
from ddl_doctor.sizes import exact_size
from ddlcore.commands.completion import files, providers, words
from ddlcore.commands.help import CORE, Group, examples, option
from ddlcore.commands.info.facts import machine_facts
from ddlcore.commands.options import SettingsCommand, setting_options
from ddlcore.config.loading import Settings
from ddlcore.errors import DdlInternalError, PluginError, RankFailed
from ddlcore.launch.job.launcher import check_route
from ddlcore.launch.job.placement import Placed, place_ranks
from ddlcore.launch.ranks.exit_status import NotStarted
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of

_MEASURED = Group("Benchmark", "what is measured, and where the times are written")


@click.command(
    cls=SettingsCommand,
    epilog=examples(
        ("ddl bench -np 4", "every collective, on 4 ranks"),
        ("ddl bench --ops allreduce --sizes 4,64K,1M --plot times.png", "one of them, with a chart"),
        ("ddl bench -H node1:4,node2:4", "8 ranks on two hosts"),
    ),
)
@option(
    "-np",
    "--num-proc",
    type=int,
    metavar="N",
    group=CORE["job"],
    brief="How many ranks. [default 2, or all slots]",
    help="How many ranks to start. [default: all slots of the hosts; 2 without hosts]",
)
@option(
    "-H",
    "--hosts",
    metavar="HOST:SLOTS,…",
    group=CORE["hosts"],
    brief="The hosts, and the most ranks on each.",
    help="The hosts, and the largest number of ranks on each. [default: this host]",
)
@option(
    "--hostfile",
    metavar="FILE",
    shell_complete=files,
    group=CORE["hosts"],
    brief="The same as a file: lines of HOST slots=N.",
    help="The same as a file: lines of the form HOST slots=N.",
)
@option(
    "--against",
    default="",
    metavar="NAMES",
    shell_complete=providers("bench_peers", many=True),
    group=_MEASURED,
    brief="Peers to compare ddl with. [default: none]",
    help="Peers to compare ddl with; `ddl info` lists them. [default: none]",
)
@option(
    "--ops",
    default=",".join(OPERATIONS),
    metavar="NAMES",
    shell_complete=words(*OPERATIONS, many=True),
    group=_MEASURED,
    brief="Which collectives. [default: all]",
    help=f"Which collectives. [default {','.join(OPERATIONS)}]",
)
@option(
    "--sizes",
    default=SIZES,
    metavar="SIZES",
    group=_MEASURED,
    brief="Bytes of the whole tensor, such as 4,64K,1M.",
    help=f"Bytes of the whole tensor, such as 4,64K,1M. [default {SIZES}]",
)
@option(
    "--dtype",
    default="f32",
    metavar="TYPE",
    shell_complete=words(*DTYPES),
    group=_MEASURED,
    brief="Type of the elements. [default f32]",
    help=f"{', '.join(DTYPES)}, or a long name. [default f32]",
)
@option(
    "--rounds",
    type=click.IntRange(min=1),
    default=9,
    metavar="N",
    group=_MEASURED,
    brief="Rounds of turns. [default 9]",
)
@option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group=_MEASURED,
    brief="Also write all times to FILE.",
)
@option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group=_MEASURED,
    brief="Also draw them to a .png, .svg or .pdf.",
)
@setting_options(in_brief=("hosts", "performance"))
def bench(
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    against: str,
    ops: str,
    sizes: str,
    dtype: str,
    rounds: int,
    json_file: Path | None,
    plot: Path | None,
    **flags: object,
) -> None:
    """Time collectives on N ranks: the transport alone, the whole call, and peers on the same data.

    All take turns within one run, because the speed of a machine changes within minutes: compare ratios, not times. If
    a host has more ranks than cores, the times mostly show the system's scheduler. Several hosts are reached as by
    `ddl run`.
    """
    try:
        peers = tuple(dict.fromkeys(name.strip() for name in against.split(",") if name.strip()))
        plan = BenchPlan(parse_operations(ops), parse_sizes(sizes), parse_dtype(dtype), rounds, peers)
        placed, settings, registry = _checked(plan, (num_proc, hosts, hostfile), flags)
        _check_files(json_file, plot)
    except (ValueError, PluginError, DdlInternalError) as error:
        raise click.ClickException(f"ddl bench: {error}") from None
    layout = placed.layout
    show = BenchOutput(plan, ranks_and_hosts(layout.size, len(layout.hosts)))
    _measure(plan, placed, settings, registry, show)
    for text in closing(show.rows, plan, show.transport):
        click.echo(text)
    if json_file is not None:
        with _writing("--json", json_file):
            json_file.write_text(json.dumps(results_json(show.rows, plan, layout, show.transport), indent=1) + "\n")
        click.echo(f"times: {json_file}")
    if plot is not None:
        from ddl_doctor.bench.chart import draw

        with _writing("--plot", plot):
            draw(plot, show.rows, show.transport, f"{_title(layout)}, {plan.dtype}")
        click.echo(f"chart: {plot}")


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"ddl bench: {option} {path}: {error.strerror}; choose another FILE") from None


def _title(layout: Layout) -> str:
    return f"{layout.size} ranks on {'one host' if len(layout.hosts) == 1 else f'{len(layout.hosts)} hosts'}"


def _checked(
    plan: BenchPlan, where: tuple[int | None, str | None, str | None], flags: Mapping[str, object]
) -> tuple[Placed, Settings, Registry]:
    """Check the user's request before anything is started.

    ``where`` holds the values of -np, -H and --hostfile (None if not given), and ``flags`` holds the settings that the
    command line gives. Return the hosts on which the ranks will run, the settings and the registry of plugins. Raises
    ValueError, PluginError or DdlInternalError if the request cannot work.
    """
    num_proc, hosts, hostfile = where
    if num_proc is None and hosts is None and hostfile is None:
        num_proc = 2
    settings, registry = settings_of(os.environ, flags)
    peers = [registry.named(Registry.bench_peers, name) for name in plan.peers]
    for peer in peers:
        registry.load(peer)
    launchers = {peer.launcher for peer in peers if peer.launcher}
    if len(launchers) > 1:
        by = " and by ".join(sorted(launchers))
        raise ValueError(f"--against {','.join(plan.peers)}: their ranks must be started by {by}; name one at a time")
    if launchers and settings.source("launcher") == "default":
        settings, registry = settings_of(os.environ, {**flags, "launcher": launchers.pop()})
    placed = place_ranks(num_proc, hosts, hostfile, settings, registry, os.environ)
    if placed.layout.size < 2:
        given = f"-np {num_proc}" if num_proc is not None else f"-H {hosts}" if hosts else f"--hostfile {hostfile}"
        raise ValueError(f"{given}: a collective needs at least 2 ranks")
    check_route(settings.text("backend"), placed.layout.ranks, registry, placed.launcher)
    return placed, settings, registry


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    for flag, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no directory {path.parent}; make it first")
        if path is not None and path.is_dir():
            raise ValueError(f"{flag} {path}: it is a directory; name a file in it")
    if plot is not None:
        from ddl_doctor.bench.chart import require_matplotlib

        require_matplotlib(plot)


def _measure(plan: BenchPlan, placed: Placed, settings: Settings, registry: Registry, show: BenchOutput) -> None:
    """Run the ranks and show their results with ``show``.

    All ranks have the same results. The first rank on this host sends each result through a named pipe, and ``show``
    prints the result at once. If no rank runs on this host, rank 0 returns all results, and ``show`` prints them at the
    end.
    """
    from ddl_doctor.bench.rank import bench_rank
    from ddlcore.launch.job.function import run_placed

    local = placed.layout.ranks_of(placed.layout.here)
    try:
        with told(show.message) as pipe:
            if not local:
                click.echo("ddl bench: no rank runs on this host, so the results are shown at the end", err=True)
            call = (bench_rank, (plan, pipe, local[0] if local else None), None)
            returned = run_placed(placed, settings, registry, os.environ, call)
        for message in returned[0]:
            show.message(message)
    except (NotStarted, RankFailed, DdlInternalError) as error:
        raise click.ClickException(f"ddl bench: {error}") from None
    finally:
        show.close()


class BenchOutput:
    """The output of a benchmark: prints the results of each measurement as soon as they arrive, and keeps all results.

    Shows the progress, too, if standard output or standard error is a terminal.
    """

    def __init__(self, plan: BenchPlan, ranks: str) -> None:
        self.rows: list[MeasuredRow] = []
        self.transport = ""
        self._plan = plan
        self._ranks = ranks  # how many, in words
        self._operation = ""
        self._progress: Any = None
        self._task: Any = None
        self._on_screen = sys.stdout.isatty()
        if self._on_screen or sys.stderr.isatty():
            self._begin_progress()

    def message(self, message: Mapping[str, Any]) -> None:
        """Show one message about the benchmark. ``measure_all`` describes the messages."""
        if "transport" in message:
            self.transport = message["transport"]
        elif "begin" in message:
            operation, nbytes = message["begin"]
            if operation != self._operation:
                self._operation = operation
                self._print(heading(operation, self._plan, self._ranks, self.transport))
            self._advance(f"{operation} {exact_size(nbytes)}", 0)
        else:
            self.rows.append(MeasuredRow.from_json(message["row"]))
            self._print([line(self.rows[-1], self._plan.peers)])
            self._advance("", 1)

    def close(self) -> None:
        """Remove the progress bar from the screen."""
        if self._progress is not None:
            self._progress.stop()

    def _begin_progress(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        # Draw only when something has happened: a thread that redraws by itself would use a core during the
        # measurements.
        console = Console(stderr=not self._on_screen)  # one console for both if rows and progress share a screen
        self._progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._progress.add_task("starting", total=len(self._plan.operations) * len(self._plan.sizes))
        self._progress.start()

    def _advance(self, description: str, steps: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=steps, **({"description": description} if description else {}))
            self._progress.refresh()

    def _print(self, lines: list[str]) -> None:
        for text in lines:
            if self._progress is not None and self._on_screen:
                self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                click.echo(text)
        sys.stdout.flush()


def results_json(rows: list[MeasuredRow], plan: BenchPlan, layout: Layout, transport: str) -> dict[str, Any]:
    """Return all measurements for JSON: the seconds per call in each round, and the ratios that the table shows.

    The entry "machine" of the result describes the host of this process. If no rank ran on this host, the host may be
    missing in the entry "hosts".
    """
    return {
        "machine": machine_facts(),
        "ranks": layout.size,
        "hosts": list(layout.hosts),
        "transport": transport,
        "dtype": plan.dtype,
        "rounds": plan.rounds,
        "rows": [{**row.as_json(), "ratios": _ratios(row, plan)} for row in rows],
    }


def _ratios(row: MeasuredRow, plan: BenchPlan) -> dict[str, list[float]]:
    found = {}
    for peer in plan.peers:
        for other in (TRANSPORT, WHOLE):
            if peer in row.times and other in row.times:
                one = ratio(row, peer, other)
                found[f"{peer}/{other}"] = [one.middle, one.low, one.high]
    return found
