"""Implement ``ddlcore.run``: call a function in many processes and return their results in rank order."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from ddlcore.config.loading import Settings
from ddlcore.control.liveness import describe_exit
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError, RankFailed, ReplicasDiffer
from ddlcore.launch.job.arguments import (
    check_call,
    number_of_ranks,
    placed_on,
    settings_asked,
)
from ddlcore.launch.job.growth import BeginHere, Growth, growth_of, host_table_of
from ddlcore.launch.job.launcher import prepare_directory
from ddlcore.launch.job.local_ranks import LateEnvironment, begin_all, chosen_port, local_environments
from ddlcore.launch.job.network import ObservedCoordinator, open_network
from ddlcore.launch.job.placement import Placed
from ddlcore.launch.job.running import RunningJob
from ddlcore.launch.job.watch import WatchedJob, Watches, watching
from ddlcore.launch.output.output import Output
from ddlcore.launch.output.screen import Screen, coloured, stream_writer
from ddlcore.launch.ranks.command import own_python
from ddlcore.launch.ranks.environment import (
    wanted_port,
)
from ddlcore.launch.ranks.exchange import FUNCTION_PROGRAM, RankResult, Task, nameless_file, read_all, write_all
from ddlcore.launch.ranks.exit_status import End, NotStarted, first_failure
from ddlcore.launch.ranks.process import RankProcess
from ddlcore.launch.ranks.warmup import compile_kernels, machine_code_of
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.registry import Registry
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_membership
from ddlcore.text.ranks import ranks_text

if TYPE_CHECKING:
    from ddlcore.launch.agents.remote_launch import RemoteLaunch
    from ddlcore.launch.agents.remote_plan import RemotePlan

_TASK = -1  # key of the file with the function, in a dict whose other keys are ranks


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    backend: str | None = None,
    start_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    torch_env: bool | None = None,
    dashboard: str | int | bool | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in ``num_proc`` new processes and return the results in rank order.

    ``func`` must call ``ddl.init()`` itself, like a script under ``ddl run``. It may be defined anywhere, also at a
    prompt or in a notebook. This process shows the output of the ranks, each line with its rank. The call returns when
    all ranks have ended, and no process remains. The positional arguments and their order are the same as for
    ``horovod.run``.

    * ``num_proc``: the number of processes. The default is the number of slots in ``hosts`` or ``hostfile``, or 2 if
      neither is given. ``np`` is a deprecated name for ``num_proc``.
    * ``hosts``, ``hostfile``, ``network_interface`` (or ``network_interfaces``; names in one text or in a list),
      ``ssh_port``, ``ssh_identity_file``: the same as the flags of ``ddl run``.
    * ``output_filename``: a directory to which the output of each rank is also written, as with ``--output-dir``.
    * ``verbose``: show the number of ranks and the number of threads.
    * ``backend``, ``start_timeout_s`` (seconds) and ``torch_env`` are settings. ``torch_env=False`` means that the
      ranks do not get torchrun's variables, as with ``--no-torch-env``.
    * ``dashboard``: the address of the live page of the job (the setting of that name). True means the first free port.
    * ``env``: variables that are added to the environment of the ranks.
    * ``start_timeout``, ``use_gloo``, ``use_mpi``, ``mpi_args``: Horovod's names for the settings ``start_timeout_s``,
      ``backend`` and ``launcher_args``. If both are given, the settings take precedence. ``disable_cache`` only gives a
      warning.
    * ``min_num_proc`` (or ``min_np``) makes the job elastic, as ``--min-np`` does. ``func`` then calls a function that
      is decorated by ``elastic.run``. The results are those of the ranks of the last world, in the order of these
      ranks. ``max_num_proc`` (or ``max_np``), ``slots``, ``reset_limit``, ``cooldown_range`` (two numbers of seconds)
      and ``host_discovery_script`` are the same as the flags ``--max-np``, ``--slots-per-host``, ``--reset-limit``,
      ``--host-cooldown-s`` and ``--host-discovery-script``.
    * ``executable``: only the interpreter of this process is allowed.

    Raises ValueError for bad arguments, and DdlInternalError if a host cannot take part. Raises RankFailed if ``func``
    raises an exception on a rank or if a rank dies. RankFailed names the rank, and its cause is the exception that was
    raised on that rank. The other ranks then have ``grace_s`` seconds (a setting) to end by themselves. Raises
    ReplicasDiffer if the ranks returned but their parameters differ.
    """
    asked = dict(locals())  # all arguments by name
    check_call(func, args, kwargs, executable)
    environ = {**os.environ, **{str(name): str(value) for name, value in (env or {}).items()}}
    settings, registry = settings_of(environ, settings_asked(asked))
    ranks = number_of_ranks(num_proc, np, hosts, hostfile, host_discovery_script)
    placed = placed_on(ranks, hosts, hostfile, settings, registry, environ)
    directory = None if output_filename is None else Path(output_filename)
    if directory is not None:
        prepare_directory(directory, placed.places)
    title = f"ddlcore.run({getattr(func, '__name__', type(func).__name__)})"
    call = (func, args, kwargs)
    try:
        with watching(WatchedJob(settings, title, tuple(placed.host_names())), registry) as watches:
            parts = (placed, watches.settings, registry, environ, call)
            results = run_placed(*parts, bool(verbose), True, directory, watches)
            watches.over(0)
        return results
    except NotStarted as error:
        raise DdlInternalError(f"run: {error}") from None


def run_placed(
    placed: Placed,
    settings: Settings,
    registry: Registry,
    environ: Mapping[str, str],
    call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any] | None],
    verbose: bool = False,
    remarks: bool = True,
    output_dir: Path | None = None,
    watches: Watches | None = None,
) -> list[Any]:
    """Call a function on ranks whose hosts are already chosen (``placed``), and return the results in rank order.

    ``call`` is (func, args, kwargs). ``remarks`` says whether to show differences between hosts that do not stop the
    job. ``output_dir`` contains a directory for each rank, to which the output of the rank is also written; None means
    that the output is only shown. ``watches`` observe the job; None means that nothing does. Raises NotStarted, with
    the problems of each host, if some hosts cannot take part. Raises the same errors as ``run`` if a rank fails or if
    parameters differ.
    """
    size, watches = placed.layout.size, watches or Watches(settings)
    task = pickle.dumps(Task(tuple(sys.path), _pickled(*call)))
    screens = watches.screens(_screens(environ))
    if size > 1:
        codes, cache_dir = machine_code_of(registry), settings.text("cache_dir")
        compile_kernels(codes, lambda text: _show(screens[1], text), cache_dir)
    output = Output(screens, placed.places, directory=output_dir)

    def say(text: str) -> None:
        output.say(f"ddlcore.run: {text}")
        watches.said(text)

    watches.open(lambda text: output.say(f"ddlcore.run: {text}"), lambda text: _show(screens[1], text))
    with contextlib.ExitStack() as stack:
        remote = None if placed.remote_plan is None else _remote_launch(placed.remote_plan, registry, say)
        membership = build_membership(placed.layout.ranks, settings, placed.places, placed.most)
        table = host_table_of(placed, settings)
        job = (placed.places, settings, registry, say, remote, None)
        server, observed = open_network(*job, membership, watches, table)
        stack.callback(server.close)
        stack.callback(watches.drained)
        if remote is not None:
            stack.callback(remote.agents.close)
            _prepare(remote, server, environ, task, lambda text: _show(screens[1], text) if remarks else None)
        network = (server.job_file, chosen_port(placed.layout, environ), watches.timeline_dir)
        threads, environments, late = local_environments(placed.layout, remote, settings, environ, *network)
        if verbose:
            say(f"{size} ranks; {', '.join(f'{name}={value}' for name, value in threads.items())}")
        files = {rank: nameless_file() for rank in (*environments, _TASK)}
        stack.callback(_close_all, files)
        write_all(files[_TASK], task)
        if remote is not None:
            remote.agents.ranks.join(output)
        processes = _begin(environments, files, output)
        again = _again(environments, late, files, output)
        growth = growth_of(table, settings, membership, again, server, remote, say)
        ends = _supervised(processes, placed, settings, server, observed, output, remote, environ, say, watches, growth)
        watches.finished(lambda text: _show(screens[1], text))
        members = range(size) if membership is None or not membership.complete else membership.world.members
        outcomes = _outcomes(placed.places, files, remote)
    results = _results(ends, outcomes, observed.raised, output, members)
    if observed.differ:  # parameters are compared after the ranks have returned
        raise ReplicasDiffer(observed.differ)
    return results


def _again(
    environments: Mapping[LaunchedRank, dict[str, str]], late: LateEnvironment, files: dict[int, int], output: Output
) -> BeginHere:
    """Return the function that starts another process of a rank on this host, with a new file for its outcome."""

    def begin_here(rank: LaunchedRank, hosts: Sequence[int]) -> RankProcess:
        if rank in files:
            os.close(files.pop(rank))
        files[rank] = nameless_file()
        process = _begin_rank(rank, environments.get(rank) or late(rank, hosts), files)
        output.add_again(rank, process.stdout, process.stderr)
        return process

    return begin_here


def _close_all(files: Mapping[int, int]) -> None:
    for fd in files.values():
        os.close(fd)


def _remote_launch(remote_plan: RemotePlan, registry: Registry, say: Callable[[str], None]) -> RemoteLaunch:
    from ddlcore.launch.agents.remote_launch import RemoteLaunch

    return RemoteLaunch(remote_plan, registry, say)


def _prepare(
    remote: RemoteLaunch,
    server: Server,
    environ: Mapping[str, str],
    task: bytes,
    show: Callable[[str], None],
) -> None:
    """Start the server and the agents, check the hosts, and send the pickled function ``task`` to the agents.

    Raises NotStarted if a host cannot take part.
    """
    server.start()
    layout = remote.remote_plan.layout
    port = wanted_port(environ) if layout.ranks[0] in layout.remote_hosts else 0
    remote.prepare(server, remote.look(sys.executable, (), port), lambda: False, show)
    remote.agents.send_task(task)


def _outcomes(places: int, files: Mapping[int, int], remote: RemoteLaunch | None) -> list[RankResult | None]:
    """Return the outcome of each rank below ``places``, in rank order: its return value or its exception.

    The outcome of a rank of this host is read from the rank's file in ``files``. The outcomes of other ranks were
    received from their agents. If a rank wrote no outcome, the result has None for this rank.
    """
    results = {} if remote is None else remote.agents.ranks.results()
    return [
        _outcome(read_all(files[rank]) if rank in files else results.get(rank, b""))
        for rank in map(LaunchedRank, range(places))
    ]


def _supervised(
    processes: list[RankProcess],
    placed: Placed,
    settings: Settings,
    server: Server,
    observed: ObservedCoordinator,
    output: Output,
    remote: RemoteLaunch | None,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    watches: Watches,
    growth: Growth | None,
) -> list[End]:
    """Let the agents start their ranks, watch all ranks until they have ended, and return the end of each rank.

    If an exception interrupts this function, such as KeyboardInterrupt, all ranks are ended before the exception is
    raised again.
    """
    agents = None if remote is None else remote.agents
    job = RunningJob(processes, settings, server, observed, say, agents, growth, watches)
    try:
        output.start()
        if remote is None:
            server.start()
        else:
            problems = remote.begin((), environ, settings, lambda: False, timeline_dir=watches.timeline_dir)
            if problems:
                raise DdlInternalError(f"run: {'; '.join(problems)}")
        ends = job.run(placed.host_names().__getitem__, placed.discovery)
        if remote is not None:
            remote.agents.release()
            remote.agents.finish(lambda: False)
        return ends
    except BaseException:  # Ctrl-C, or an exception that one of the caller's signal handlers raised
        job.supervisor.stop()
        raise
    finally:
        output.drain()


def _show(screen: Screen, text: str) -> None:
    screen.show("ddl", [(f"ddlcore.run: {line}".encode(), b"\n") for line in text.splitlines()])


def _pickled(func: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    except Exception as error:  # pickling runs the objects' own code
        raise ValueError(f"run: func or its arguments cannot be sent to another process: {error}") from error
    return pickled


def _begin(
    environments: Mapping[LaunchedRank, Mapping[str, str]], files: Mapping[int, int], output: Output
) -> list[RankProcess]:
    """Start all ranks of this host, and return their processes.

    If a rank cannot be started, kill the ranks that were started before. Each rank itself makes sure, after exec, that
    it dies with this process, because no Python code may run in the child between fork and exec.
    """

    return begin_all(list(environments), lambda rank: _begin_rank(rank, environments[rank], files), output)


def _begin_rank(rank: LaunchedRank, environment: Mapping[str, str], files: Mapping[int, int]) -> RankProcess:
    # The caller's process may run any number of threads. A fork copies locked locks but not the threads that would
    # unlock them, so Python code before exec could wait forever for such a lock. Therefore no `in_child` is passed.
    fds = (files[_TASK], files[rank])
    command = own_python(FUNCTION_PROGRAM, *map(str, (*fds, os.getpid())))
    return RankProcess.begin(rank, command, environment, pass_fds=fds)


def _screens(environ: Mapping[str, str]) -> tuple[Screen, Screen]:
    """Return screens that write to the present sys.stdout and sys.stderr.

    The screens use no file descriptors, because in a notebook these streams have none.
    """

    def screen(stream: Any) -> Screen:
        terminal = bool(getattr(stream, "isatty", bool)())
        return Screen(stream_writer(stream), is_terminal=terminal, colour=coloured(environ, terminal))

    return screen(sys.stdout), screen(sys.stderr)


def _outcome(data: bytes) -> RankResult | None:
    """Return the outcome that a rank wrote as the bytes ``data``.

    Return None if ``data`` is incomplete or empty, because the rank ended before it had written its outcome.
    """
    if not data:
        return None
    try:
        outcome: RankResult = pickle.loads(data)  # trusted: only our own rank or its agent can have written it
    except Exception:  # the rank was killed while it wrote
        return None
    return outcome


def _results(
    ends: Sequence[End],
    outcomes: Sequence[RankResult | None],
    raised: Sequence[LaunchedRank],
    output: Output,
    members: Sequence[int],
) -> list[Any]:
    """Return the return values of the function on the ranks ``members``, in the order of ``members``.

    If a rank has failed or has no return value, raise RankFailed for the rank that failed first.
    """
    values: list[Any] = []
    if all(end.returncode == 0 for end in ends):
        present = [outcome for outcome in map(outcomes.__getitem__, members) if outcome is not None and outcome.value]
        values = [pickle.loads(outcome.value) for outcome in present]
        if len(values) == len(members):
            return values
    primary = [end for end in ends if not _is_secondary(outcomes[end.rank])]
    first = (
        first_failure(primary, raised)
        or first_failure(ends, raised)
        or min(ends, key=lambda end: outcomes[end.rank] is not None)
    )
    raise _failure(first, outcomes, ends, output.last_lines(first.rank)) from _cause(outcomes[first.rank])


def _is_secondary(outcome: RankResult | None) -> bool:
    return outcome is not None and outcome.secondary


def _failure(
    first: End, outcomes: Sequence[RankResult | None], ends: Sequence[End], last_lines: Sequence[str]
) -> RankFailed:
    outcome = outcomes[first.rank]
    if outcome is not None and outcome.text:
        lines = [f"rank {first.rank} raised {outcome.text}"]
    else:
        how = "" if outcome is None else " after func had returned"
        lines = [f"rank {first.rank} {first.reason if first.silent else describe_exit(first.returncode)}{how}"]
        lines += ["  its last lines:", *(f"  | {line}" for line in last_lines)] if last_lines else []
    others: dict[str, list[int]] = {}
    for end in sorted(ends, key=lambda end: end.rank):
        theirs = outcomes[end.rank]
        if end.rank != first.rank and end.returncode != 0:
            text = theirs.text if theirs is not None and theirs.text else describe_exit(end.returncode)
            others.setdefault("ended by the launcher" if end.stopped else text, []).append(end.rank)
    lines += [f"  {ranks_text(ranks)}: {text}" for text, ranks in others.items()]
    return RankFailed(first.rank, "\n".join(lines))


class _RemoteTraceback(Exception):
    """An exception whose text is a traceback from another process. It is used as the cause of another exception."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f'\n"""\n{self.trace}"""'


def _cause(outcome: RankResult | None) -> BaseException | None:
    if outcome is None or not outcome.text:
        return None
    remote = _RemoteTraceback(outcome.trace)
    if not outcome.error:
        return remote
    try:
        error = pickle.loads(outcome.error)
    except Exception:  # its class may not be importable here
        return remote
    if not isinstance(error, BaseException):
        return remote
    error.__cause__ = remote
    return error
