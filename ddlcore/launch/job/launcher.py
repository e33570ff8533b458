"""Run one job from this host: check the request, start the ranks, watch them, and make sure that no process remains."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddlcore.config.loading import Settings
from ddlcore.control.server import Server
from ddlcore.coordinator.membership import Coordinating, ElasticMembership
from ddlcore.coordinator.quorum import Quorum
from ddlcore.coordinator.tuning import SearchDriver
from ddlcore.errors import DdlInternalError
from ddlcore.launch.job.growth import BeginHere, HandOver, growth_of, host_table_of, no_successor
from ddlcore.launch.job.handover import HandingOver, directory_of_successors
from ddlcore.launch.job.local_ranks import begin_all, local_environments
from ddlcore.launch.job.network import ObservedCoordinator, open_network
from ddlcore.launch.job.running import RunningJob
from ddlcore.launch.job.signals import SignalTrap
from ddlcore.launch.job.watch import Watch, WatchedJob, Watches, watching
from ddlcore.launch.output.output import Output, rank_directory
from ddlcore.launch.output.screen import Screen, coloured, file_writer
from ddlcore.launch.ranks.command import may_run_python
from ddlcore.launch.ranks.environment import (
    master_port,
    usable_cores,
)
from ddlcore.launch.ranks.exit_status import End, NotStarted, first_failure, summary
from ddlcore.launch.ranks.hosts import Layout
from ddlcore.launch.ranks.process import RankProcess, adopt_orphans, die_with_launcher
from ddlcore.launch.ranks.supervisor import Supervisor
from ddlcore.launch.ranks.warmup import compile_kernels, machine_code_of
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.registry import Registry
from ddlcore.process.build import build_membership
from ddlcore.runtime.routes import Route, choose_route
from ddlcore.types import Member

if TYPE_CHECKING:
    from ddlcore.launch.agents.remote_launch import RemoteLaunch
    from ddlcore.launch.agents.remote_plan import RemotePlan
    from ddlcore.launch.job.host_table import HostTable
    from ddlcore.launch.job.placement import Placed


class EndEarly:
    """A callable object that ends the ranks of a launch before they end by themselves. Any thread may call it.

    If the ranks run, the call ends them at once. If they have not started yet, they are ended as soon as they start.
    """

    def __init__(self) -> None:
        self.asked = False
        self._how: Callable[[], None] | None = None

    # There is no lock, so the order matters: a call sets `asked` before it reads `_how`, and `attach` sets `_how`
    # before it reads `asked`. If both run at the same time, at least one of them sees the value that the other has
    # written, so no request is lost. Both may call `how`; a second call of `how` has no effect.
    def __call__(self) -> None:
        self.asked = True
        if self._how is not None:
            self._how()

    def attach(self, how: Callable[[], None]) -> None:
        """Register ``how``, a function that ends the ranks. Any thread must be allowed to call ``how``.

        If the end of the ranks was requested before, call ``how`` now.
        """
        self._how = how
        if self.asked:
            how()


@dataclass(frozen=True)
class JobDescription:
    """The description of one job. All values have been checked."""

    command: tuple[str, ...]  # the result of resolve_command
    placed: Placed
    settings: Settings
    registry: Registry
    environ: Mapping[str, str]
    port: int  # MASTER_PORT; 0: any port that is free on rank 0's host
    needs: tuple[str, ...] = ()  # files that must exist on every host
    output_dir: Path | None = None
    stamped: bool = False
    verbose: bool = False
    watches: tuple[Watch, ...] = ()  # beside those that the settings ask for
    driver: SearchDriver | None = None  # searches for better settings while the job trains
    end: EndEarly | None = None  # lets another thread end the ranks early

    @property
    def layout(self) -> Layout:
        return self.placed.layout

    @property
    def remote_plan(self) -> RemotePlan | None:
        """The plan by which agents start ranks, or None if this process starts all ranks without agents."""
        return self.placed.remote_plan

    @property
    def launched_by(self) -> str:
        """The name of the launcher that starts the agents, or "" if there are no agents."""
        return self.placed.launcher

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def places(self) -> int:
        """The number of different rank numbers that the job may use, from 0 to this number - 1.

        In an elastic job, this may be more than the number of ranks at the start.
        """
        return self.placed.places


def check_route(backend: str, hosts: Sequence[int], registry: Registry, launcher: str = "") -> Route | None:
    """Return the route, which names the transports that the ranks will use. Return None if "auto" finds no transport.

    None is not an error here, because only a script that calls ``init()`` needs a transport. ``backend`` is the setting
    of this name, and ``hosts`` has the host index of each rank. ``launcher`` is the name of the launcher that starts
    the ranks. Raises ValueError, PluginError or TransportError, with a message of one line, if ``backend`` is malformed
    or if its transports cannot serve these ranks.
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
    _ = route.launcher  # raises if its transports need two different launchers
    return route


def prepare_directory(directory: Path, size: int) -> None:
    """Create a directory for the output of each of ``size`` ranks below ``directory``.

    Raises ValueError, with a message of one line, if a directory cannot be created.
    """
    try:
        for rank in range(size):
            rank_directory(directory, rank, size).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output-dir {directory}: {error.strerror} ({error.filename})") from None


def run_job(launch: JobDescription) -> int:
    """Run the job to its end and return the launcher's exit code. Only the main thread may call this.

    If a rank failed by itself, return the exit code of the rank that failed first. If no rank failed by itself, return
    the first of these codes whose condition is true: 130 if all ranks were killed; 1 if a rank that the launcher has
    ended has another exit code than 0, or if the ranks' parameters differ; STOPPED if all ranks agreed to stop; 0
    otherwise. Raises NotStarted if no rank was started.
    """
    job = WatchedJob(launch.settings, _title(launch.command), tuple(launch.placed.host_names()))
    with watching(job, launch.registry, launch.watches) as watches:
        code = _run(replace(launch, settings=watches.settings), watches)
        watches.over(code)
    return code


def _run(launch: JobDescription, watches: Watches) -> int:
    if launch.output_dir is not None:
        prepare_directory(launch.output_dir, launch.places)
    screens = watches.screens(_screens(launch.environ))
    output = Output(screens, launch.places, directory=launch.output_dir, stamped=launch.stamped, verbose=launch.verbose)

    def say(text: str) -> None:
        output.say(f"ddl run: {text}")
        watches.said(text)

    watches.open(lambda text: output.say(f"ddl run: {text}"), screens[1].say)
    if launch.size > 1 and may_run_python(launch.command):
        compile_kernels(machine_code_of(launch.registry), screens[1].say, launch.settings.text("cache_dir"))
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        quorum = _quorum(launch)
        places, home = (launch.places, launch.placed.most), Coordinating(host=launch.layout.here)
        membership = build_membership(launch.layout.ranks, launch.settings, *places, quorum, home)
        remote = _remote_launch(launch, membership, say)
        table = host_table_of(launch.placed, launch.settings)
        server, observed = _open(launch, remote, membership, table, say, watches)
        stack.callback(server.close)
        stack.callback(watches.drained)
        # The trap must be entered before the first rank or agent starts: otherwise a Ctrl-C during the start would end
        # this process by an exception, and no process would watch the ranks. The trap keeps the signals that arrive
        # until `trap.forward` is called, because before that there is no supervisor that could react to a signal.
        trap = stack.enter_context(SignalTrap(stays=remote is not None))
        if remote is not None:
            stack.callback(remote.agents.close)
            _prepare(launch, remote, server, trap, screens[1].say)
        begun_s = time.monotonic()
        processes, begin_here = _begin(launch, server, output, say, remote, watches.timeline_dir)
        if remote is not None:
            _begin_remote(launch, remote, output, processes, trap, watches.timeline_dir)
        parts = (begin_here, server, remote, say, _handing_over(launch, remote, quorum))
        growth = growth_of(table, launch.settings, membership, *parts)
        agents = None if remote is None else remote.agents
        job = RunningJob(processes, launch.settings, server, observed, say, agents, growth, watches)
        supervisor = job.supervisor
        trap.forward(supervisor.deliver, say)
        if launch.end is not None:
            launch.end.attach(supervisor.finish)
        host_of = growth.host_name if growth is not None else launch.placed.host_names().__getitem__
        ends = job.run(host_of, launch.placed.discovery)
        interrupts = trap.interrupts
        if remote is not None:
            remote.agents.release()
            remote.agents.finish(lambda: trap.interrupts > interrupts)
        output.drain(give_up=lambda: trap.interrupts > interrupts)
        watches.finished(screens[1].say)
    _conclude(launch, host_of, ends, observed, output, screens[1], supervisor, begun_s)
    return observed.exit_code(ends, supervisor.killed)


def _remote_launch(
    launch: JobDescription, membership: ElasticMembership | None, say: Callable[[str], None]
) -> RemoteLaunch | None:
    if launch.remote_plan is None:
        return None
    from ddlcore.launch.agents.remote_launch import RemoteLaunch

    unheard = None if membership is None else membership.unheard
    return RemoteLaunch(launch.remote_plan, launch.registry, say, unheard)


def _open(
    launch: JobDescription,
    remote: RemoteLaunch | None,
    membership: ElasticMembership | None,
    table: HostTable | None,
    say: Callable[[str], None],
    watches: Watches,
) -> tuple[Server, ObservedCoordinator]:
    """Open the control network, and return its server, and the failure log."""

    def told_stop(reason: str) -> None:
        say(f"asked to stop ({reason}): the ranks stop at the same step")

    try:
        job = (launch.places, launch.settings, launch.registry, say, remote, launch.driver)
        return open_network(*job, membership, watches, table, told_stop)
    except (ValueError, DdlInternalError) as error:
        raise NotStarted(str(error)) from None


def _handing_over(launch: JobDescription, remote: RemoteLaunch | None, quorum: Quorum | None) -> HandOver:
    """Return the function that tells agents what a successor of this launcher needs."""
    if remote is None or quorum is None:
        return no_successor
    most = max(launch.size, launch.placed.most)
    return HandingOver(remote, most, directory_of_successors(launch.output_dir))


def _quorum(launch: JobDescription) -> Quorum | None:
    """Return what keeps two parts of the job from going on beside each other; None if only the launcher's part can."""
    if launch.remote_plan is None:
        return None
    from ddlcore.launch.agents.remote_launch import goes_on_without_launcher

    return Quorum() if goes_on_without_launcher(launch.settings, launch.command) else None


def _prepare(
    launch: JobDescription, remote: RemoteLaunch, server: Server, trap: SignalTrap, show: Callable[[str], None]
) -> None:
    server.start()
    away = launch.layout.ranks[0] in launch.layout.remote_hosts
    look = remote.look(launch.command[0], launch.needs, launch.port if away else 0)
    try:
        remote.prepare(server, look, trap.came, show, launch.verbose, os.isatty(2))
    except NotStarted:
        _stop_if_asked(trap)
        raise
    _stop_if_asked(trap)


def _begin_remote(
    launch: JobDescription,
    remote: RemoteLaunch,
    output: Output,
    local: Sequence[RankProcess],
    trap: SignalTrap,
    timeline_dir: Path | None,
) -> None:
    """Tell the agents to start their ranks, and wait until all agents have done so.

    Raises NotStarted if an agent cannot start its ranks, or if a signal that ends the job has arrived. In this case,
    this function first kills the ranks of this host (``local``). The agents kill their ranks when the agents are
    closed.
    """
    problems = remote.begin(launch.command, launch.environ, launch.settings, trap.came, gives_input(), timeline_dir)
    if problems or trap.came():
        for process in local:
            process.signal_group(signal.SIGKILL)
            process.process.wait(5.0)
        output.drain()
        _stop_if_asked(trap)
        raise NotStarted("; ".join(problems))
    if launch.verbose:
        begun = [(member.place, member.begun.pids) for member in remote.agents.members if member.begun is not None]
        pids = [(rank, pid, place.host) for place, pids in begun for rank, pid in zip(place.ranks, pids)]
        for rank, pid, host in sorted(pids):
            output.say(f"ddl run: rank {rank} is process {pid} on {host}")


def _stop_if_asked(trap: SignalTrap) -> None:
    number = trap.came()
    if number:
        raise NotStarted(f"interrupted by signal {number} before the ranks had started", 128 + number)


def _begin(
    launch: JobDescription,
    server: Server,
    output: Output,
    say: Callable[[str], None],
    remote: RemoteLaunch | None,
    timeline_dir: Path | None,
) -> tuple[list[RankProcess], BeginHere]:
    """Start the ranks of this host.

    Return their processes, and a function that starts another process of a rank on this host. Raises NotStarted if a
    rank cannot be started.
    """
    port = launch.port if remote is not None else launch.port or master_port({})
    threads, environments, late = local_environments(
        launch.layout, remote, launch.settings, launch.environ, server.job_file, port, timeline_dir
    )
    if threads and environments:
        share, cores = next(iter(threads.values())), usable_cores()
        say(f"{', '.join(threads)} set to {share} ({cores} cores over {len(environments)}); set them to change that")
    if remote is not None:
        remote.agents.ranks.join(output)
    tie = die_with_launcher(os.getpid())

    def begin(rank: LaunchedRank, environment: Mapping[str, str] | None = None) -> RankProcess:
        stdin = None if rank == 0 and gives_input() else subprocess.DEVNULL
        return RankProcess.begin(rank, launch.command, environment or environments[rank], stdin=stdin, in_child=tie)

    try:
        processes = begin_all(list(environments), begin, output)
    except OSError as error:
        raise NotStarted(f"the ranks cannot be started: {error.strerror} ({error.filename})") from None
    if launch.verbose:
        _say_placement(launch, processes, say)
    output.start()
    if remote is None:
        server.start()

    def again(rank: LaunchedRank, hosts: Sequence[int]) -> RankProcess:
        process = begin(rank, environments.get(rank) or late(rank, hosts))
        output.add_again(rank, process.stdout, process.stderr)
        return process

    return processes, again


def _say_placement(launch: JobDescription, processes: Sequence[RankProcess], say: Callable[[str], None]) -> None:
    say(f"each of {launch.size} ranks runs: {' '.join(launch.command)}")
    launcher = "" if launch.remote_plan is None else launch.remote_plan.provider.name
    route = check_route(launch.settings.text("backend"), launch.layout.ranks, launch.registry, launcher)
    say(f"transport {route.name} ({route.reason})" if route else "no transport serves these ranks; see `ddl info`")
    for name in launch.settings:
        if launch.settings.source(name) != "default":
            say(f"setting {name} = {launch.settings[name]} (from {launch.settings.source(name)})")
    for process in processes:
        say(f"rank {process.rank} is process {process.process.pid} on {socket.gethostname()}")


def gives_input() -> bool:
    """Return whether rank 0 gets this process's stdin.

    Return False if stdin is a terminal: rank 0's process group is in the background, so rank 0 could not read from the
    terminal.
    """
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
            return out, out  # one shared screen, so that a line of stderr first ends an unfinished line of stdout
    return out, screen(2)


def _conclude(
    launch: JobDescription,
    host_of: Callable[[int], str],
    ends: Sequence[End],
    observed: ObservedCoordinator,
    output: Output,
    screen: Screen,
    supervisor: Supervisor,
    begun_s: float,
) -> None:
    history = observed.history.summary() if observed.history is not None else ""
    if history:
        screen.say(history)
    first = first_failure(ends, observed.raised)
    interrupted_s = supervisor.interrupted_s
    if interrupted_s is not None and (first is None or first.at_s >= interrupted_s):  # else a rank had failed before
        screen.say(f"interrupted after {interrupted_s - begun_s:.1f} s{' and killed' if supervisor.killed else ''}")
        return
    if first is None:
        if observed.differ:  # parameters are compared after the ranks have ended their scripts
            screen.say(observed.differ)
        return
    lines = output.last_lines(first.rank)
    text = summary(ends, first, host_of(first.rank), lines, first.at_s - begun_s, output.wrote(first.rank))
    if launch.output_dir is not None:
        text += f"\n  all that it wrote is in {rank_directory(launch.output_dir, first.rank, launch.places)}"
    screen.say(text)


def _title(command: Sequence[str]) -> str:
    return " ".join([os.path.basename(command[0]), *command[1:]])
