"""Runs one job on this host: what is checked before, what is started, what is left when it ends (nothing)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlcore.config import Settings
from ddlcore.control.server import Server
from ddlcore.launch.command import may_run_python
from ddlcore.launch.environment import rank_environments, setting_variables, thread_variables, usable_cores
from ddlcore.launch.network import Witness, open_network
from ddlcore.launch.output import Output, rank_directory
from ddlcore.launch.process import RankProcess, adopt_orphans, die_with_launcher
from ddlcore.launch.screen import Screen, coloured, file_writer
from ddlcore.launch.signals import SignalTrap
from ddlcore.launch.supervisor import Supervisor
from ddlcore.launch.verdict import End, exit_code, first_failure, summary
from ddlcore.launch.warmup import compile_kernels
from ddlcore.plug.registry import Registry
from ddlcore.runtime.routes import Route, choose_route
from ddlcore.types import Member

__all__ = ["Launch", "NotStarted", "check_route", "prepare_directory", "run_job"]


class NotStarted(Exception):
    """No rank runs, for the reason that its one line gives."""


@dataclass(frozen=True)
class Launch:
    """What was asked for, already checked."""

    command: tuple[str, ...]  # resolved
    hosts: tuple[int, ...]  # (size,) host index of each rank
    settings: Settings
    registry: Registry
    environ: Mapping[str, str]
    port: int  # MASTER_PORT
    output_dir: Path | None = None
    stamped: bool = False
    verbose: bool = False

    @property
    def size(self) -> int:
        return len(self.hosts)


def check_route(backend: str, hosts: Sequence[int], registry: Registry, launcher: str = "") -> Route | None:
    """The transport that the ranks will take; None where `auto` finds none, which only matters to who calls init.

    ``launcher``: what starts them. Raises ValueError, PluginError or TransportError, in one line, for a
    backend that makes no sense or cannot serve them.
    """
    members = [Member(rank, host) for rank, host in enumerate(hosts)]
    if backend == "auto":
        with contextlib.suppress(RuntimeError):
            return choose_route(backend, members, registry, launcher)
        return None
    route = choose_route(backend, members, registry, launcher)
    inside = sorted({provider.name for provider in route.providers() if provider.in_process})
    if inside and len(hosts) > 1:
        raise ValueError(
            f"--backend {backend}: the ranks of {inside[0]} are threads of one process, not processes; "
            "use --backend auto"
        )
    return route


def prepare_directory(directory: Path, size: int) -> None:
    """Makes one directory a rank. Raises ValueError in one line where that cannot be."""
    try:
        for rank in range(size):
            rank_directory(directory, rank, size).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output-dir {directory}: {error.strerror} ({error.filename})") from None


def run_job(launch: Launch) -> int:
    """The exit code: that of the first rank that failed, 0 where none did. Call it in the main thread."""
    if launch.output_dir is not None:
        prepare_directory(launch.output_dir, launch.size)
    screens = _screens(launch.environ)
    output = Output(screens, launch.size, directory=launch.output_dir, stamped=launch.stamped)

    def say(text: str) -> None:
        output.say(f"ddl run: {text}")

    if launch.size > 1 and may_run_python(launch.command):
        compile_kernels(lambda text: _show(screens[1], text), launch.settings.text("cache_dir"))
    adopt_orphans()
    server, witness = open_network(launch.size, launch.settings, launch.registry, say)
    begun_s = time.monotonic()
    try:
        with SignalTrap() as trap:
            processes = _begin(launch, server, output, say)
            supervisor = Supervisor(
                processes, grace_s=launch.settings.number("grace_s"), ended=server.rank_ended, say=say
            )
            trap.forward(supervisor.deliver)
            ends = supervisor.run()
            interrupts = trap.interrupts
            output.drain(give_up=lambda: trap.interrupts > interrupts)
    finally:
        server.close()
    _conclude(launch, ends, witness, output, screens[1], supervisor.interrupted, begun_s)
    return exit_code(ends, witness.raised, killed=supervisor.killed)


def _begin(launch: Launch, server: Server, output: Output, say: Callable[[str], None]) -> list[RankProcess]:
    """Starts all ranks, or none: where one does not start, those before it are killed."""
    threads = thread_variables(launch.environ, usable_cores(), launch.hosts.count(0))
    if threads:
        share = next(iter(threads.values()))
        say(f"{', '.join(threads)} set to {share} ({usable_cores()} cores over {launch.size}); set them to change that")
    added = {**threads, **setting_variables(launch.settings)}
    environments = rank_environments(launch.environ, launch.hosts, server.job_file, added, launch.port)
    tie = die_with_launcher(os.getpid())
    processes: list[RankProcess] = []
    try:
        for rank, environment in enumerate(environments):
            stdin = None if rank == 0 and _gives_input() else subprocess.DEVNULL
            processes.append(RankProcess.begin(rank, launch.command, environment, stdin=stdin, in_child=tie))
        for process in processes:
            output.add(process.rank, process.stdout, process.stderr)
    except BaseException as error:
        for process in processes:
            process.kill()
        if isinstance(error, OSError):
            raise NotStarted(f"the ranks cannot be started: {error.strerror} ({error.filename})") from None
        raise
    if launch.verbose:
        _say_placement(launch, processes, say)
    output.start()
    server.start()
    return processes


def _say_placement(launch: Launch, processes: Sequence[RankProcess], say: Callable[[str], None]) -> None:
    say(f"each of {launch.size} ranks runs: {' '.join(launch.command)}")
    route = check_route(launch.settings.text("backend"), launch.hosts, launch.registry)
    say(f"transport {route.name} ({route.reason})" if route else "no transport serves these ranks; see `ddl info`")
    for name in launch.settings:
        if launch.settings.source(name) != "default":
            say(f"setting {name} = {launch.settings[name]} (from {launch.settings.source(name)})")
    for process in processes:
        say(f"rank {process.rank} is process {process.process.pid} on {socket.gethostname()}")


def _gives_input() -> bool:
    """Whether stdin is something that rank 0 can read: a terminal is not, its group stands in the background."""
    try:
        return not os.isatty(0)
    except OSError:
        return False


def _screens(environ: Mapping[str, str]) -> tuple[Screen, Screen]:
    def screen(fd: int) -> Screen:
        terminal = os.isatty(fd)
        return Screen(file_writer(fd), is_terminal=terminal, colour=coloured(environ, terminal))

    out = screen(1)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            return out, out  # one place: a line of stdout that has begun must be ended before one of stderr
    return out, screen(2)


def _conclude(
    launch: Launch,
    ends: Sequence[End],
    witness: Witness,
    output: Output,
    screen: Screen,
    interrupted: bool,
    begun_s: float,
) -> None:
    first = first_failure(ends, witness.raised)
    if first is None:
        return
    lines = [] if interrupted else output.last_lines(first.rank)
    text = summary(ends, first, socket.gethostname(), lines, first.at_s - begun_s)
    if launch.output_dir is not None:
        text += f"\n  all that it wrote is in {rank_directory(launch.output_dir, first.rank, launch.size)}"
    _show(screen, text)


def _show(screen: Screen, text: str) -> None:
    screen.show("ddl", [(line.encode(), b"\n") for line in f"ddl run: {text}".splitlines()])
