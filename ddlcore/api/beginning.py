"""Starts the job of this process, and decides which job that is."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddlcore.api.ending import at_end_of_main_thread, at_exit, shut_down
from ddlcore.api.process_set import ProcessSet, add_process_set, global_process_set
from ddlcore.api.threads import before_threads_are_joined
from ddlcore.api.world import PROCESS, is_initialized
from ddlcore.errors import DdlInternalError, InvalidArgument
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.settings import settings_of
from ddlcore.process.detection import detect
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job
from ddlcore.process.jobs import elastic_job, launched_job, lone_job
from ddlcore.reentry import Lock, reentrant
from ddlcore.text.installing import pip_install
from ddlcore.threads import on_own_thread
from ddlcore.types import Placement

if TYPE_CHECKING:
    from ddlcore.contracts.cluster import RankInfo

__all__ = ["begin", "enter_world", "init"]


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Start the job. Every rank of the world must call this. The call returns when all ranks have called it; in
    an elastic job it returns at once, and ``elastic.run`` waits for the others.

    A call while a job is running has no effect. Without a launcher, the world has one rank.

    ``comm``: the ranks of the world. None: all launched ranks. A list of launched ranks: only these ranks form the
    world. A communicator of another library: the ranks of this communicator, if a plugin for that library is installed.
    All ranks of the world must pass the same ``comm``. ``process_sets``: process sets to register at once, the same on
    every rank. The value "dynamic" registers no set and is accepted for Horovod's scripts; sets can always be added
    later.

    Raises PeerLost if a rank dies during the call, DeadlineExceeded if ranks are missing after ``DDL_START_TIMEOUT_S``,
    ValueError for invalid arguments, and ReentrantCall if a signal handler calls this in the middle of ``init`` or
    ``shutdown``, or a finalizer on one of ddl's own threads.
    """
    begin(comm, process_sets, os.environ)


def begin(
    comm: Any,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None,
    environ: Mapping[str, str],
    make_job: Callable[[], Job] | None = None,
) -> None:
    """Do what ``init`` does, with the settings in ``environ``.

    ``make_job`` returns the job, which is not started yet. None: whoever has started this process decides which job it is.
    """
    if is_initialized():
        return
    _refuse_children()
    if PROCESS.pid != os.getpid():
        PROCESS.changing = Lock()  # after a fork: the thread that may have held the lock is not in this process
    if on_own_thread():  # another thread may be inside ``init``, and wait for this one
        raise reentrant("init()")
    changing = PROCESS.lock()
    changing.refuse("init()")
    with changing:
        if not is_initialized():
            _init(process_sets, make_job or partial(_make_job, comm, environ))


def enter_world(job: Job) -> None:
    """Start ``job`` and make it the current job. ``job`` is this process's job in the next world of an elastic job.

    Raises the same errors as ``Job.start``.
    """
    with PROCESS.lock():
        _start(job)


def _init(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None, make_job: Callable[[], Job]) -> None:
    if PROCESS.pid != os.getpid():
        PROCESS.pid = os.getpid()
        atexit.register(at_exit)
        before_threads_are_joined(at_end_of_main_thread)
    _start(make_job())
    Environment.mark_children(True, external=PROCESS.external_rank is not None)
    if process_sets is not None and process_sets != "dynamic":
        _register(process_sets)


def _start(job: Job) -> None:
    job.start()
    if PROCESS.has_world_of_threads():
        PROCESS.thread.job = job
    else:
        PROCESS.job = job
    atexit.unregister(at_exit)  # register it last: then it runs before the handlers of libraries that the job loaded
    atexit.register(at_exit)


def _register(process_sets: Sequence[ProcessSet | Sequence[int]] | str) -> None:
    try:
        if isinstance(process_sets, str):
            raise InvalidArgument(f"process_sets={process_sets!r} is neither a list of ProcessSet nor 'dynamic'")
        known = {tuple(global_process_set.ranks)}
        for number, given in enumerate(process_sets):
            one = given if isinstance(given, ProcessSet) else ProcessSet(given)
            if tuple(one.ranks) in known:
                raise InvalidArgument(
                    f"ddl could not be initialized: process_sets entry number {number} is a duplicate: {one}"
                )
            known.add(tuple(one.ranks))
            add_process_set(one)
    except ValueError:
        shut_down()
        raise


def _refuse_children() -> None:
    parent = Environment.child_of()
    if parent:
        raise DdlInternalError(
            f"init() was called in a process that a rank (process {parent}) has started; "
            "only the processes that the launcher started take part"
        )


def _make_job(comm: Any, environ: Mapping[str, str]) -> Job:
    environment = Environment.read()
    registry = None
    if environment is None and PROCESS.external_rank is None:
        PROCESS.external_rank, registry = detect(environ)
    external_rank = PROCESS.external_rank
    launched: Placement | RankInfo = Placement(0, (0,))
    if environment is not None:
        launched = environment.placement
    elif external_rank is not None:
        launched = external_rank.rank_info
    if environment is not None and environment.elastic:
        if comm is not None:
            raise InvalidArgument("init: an elastic job (ddl run --min-np) has one world; leave comm out")
        before, PROCESS.member = elastic_job(environment, environ)
        return before
    ranks = None if comm is None else _ranks_of(comm, launched)
    if environment is None and external_rank is None:
        return lone_job(registry, environ)
    if ranks is not None and launched.rank not in ranks:
        raise InvalidArgument(
            f"init: rank {launched.rank} is not in comm={list(ranks)}; call init(comm=…) only on its ranks"
        )
    ordinal = PROCESS.ordinals.get(ranks, 0) + 1
    if environment is not None:
        job = launched_job(environment, ranks, ordinal, environ)
    else:
        assert external_rank is not None
        job = external_rank.job(ranks, ordinal)
    PROCESS.ordinals[ranks] = ordinal  # only after success, so that a retry uses the same ordinal as before
    return job


def _ranks_of(comm: Any, launched: Placement | RankInfo) -> tuple[LaunchedRank, ...] | None:
    if not isinstance(comm, (list, tuple, range)):
        comm = _ranks_of_communicator(comm, launched)
    ranks = tuple(LaunchedRank(int(rank)) for rank in comm)
    if not ranks:
        return None  # as in Horovod, an empty list means all ranks
    if len(set(ranks)) != len(ranks) or any(not 0 <= rank < launched.size for rank in ranks):
        raise InvalidArgument(f"init: comm={list(ranks)} must name different ranks between 0 and {launched.size - 1}")
    return None if ranks == tuple(range(launched.size)) else ranks


def _ranks_of_communicator(comm: Any, launched: Placement | RankInfo) -> Sequence[int]:
    _, registry = settings_of(os.environ, warns=False)
    provider = registry.communicators_of(comm)
    if provider is None:
        library = type(comm).__module__.partition(".")[0]
        plugin = ALIASES["library of communicators"].get(library)
        raise InvalidArgument(
            f"init: comm is of type {type(comm).__name__}; expected a list of ranks, or a communicator of another "
            + (
                f"library; for {library}'s: {registry.off(plugin) or pip_install(plugin)}"
                if plugin
                else "library, for which that library's plugin is needed"
            )
        )
    ranks: Sequence[int] = registry.load(provider)().ranks_of(comm, launched.rank, launched.size)
    return ranks
