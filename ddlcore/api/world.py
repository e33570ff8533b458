"""Keeps the current job, which the collectives use.

The functions of this module start and end the job, return ranks and sizes, and register process sets.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ddlcore.api.threads import before_threads_are_joined, others_are_alive
from ddlcore.contracts.framework import JobService
from ddlcore.errors import DdlInternalError, InvalidArgument, NotInitialized
from ddlcore.messages.coding import encode
from ddlcore.messages.spec import Spec
from ddlcore.plug.aliases import ALIASES
from ddlcore.plug.settings import settings_of
from ddlcore.process.detection import detect
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job
from ddlcore.process.jobs import elastic_job, launched_job, lone_job
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.meter import Stats
from ddlcore.runtime.reentry import Lock, reentrant
from ddlcore.runtime.request import ANONYMOUS, Entry
from ddlcore.text.installing import pip_install
from ddlcore.threads import on_own_thread
from ddlcore.types import Kind, Placement

if TYPE_CHECKING:
    from ddlcore.contracts.cluster import RankInfo
    from ddlcore.process.elastic_member import ElasticMember
    from ddlcore.process.external_rank import ExternalRank

__all__ = [
    "ProcessSet",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "current_job",
    "elastic_member",
    "enter_world",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "job_of",
    "leave_world",
    "local_rank",
    "local_size",
    "present_job",
    "process_sets",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "use_job",
]


class _Process:
    """The present job of this process, and the values that the process keeps from one job to the next."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.ordinals: dict[tuple[int, ...] | None, int] = {}
        self.thread = threading.local()  # .job: in a world of threads, the job of this thread
        self.worlds = False  # whether any thread has ever had its own job
        self.pid = 0
        self.changing = Lock()  # held during ``init`` and ``shutdown``, so that only one of them runs at a time
        self.external_rank: ExternalRank | None = None  # set if another launcher has started this process
        self.member: ElasticMember | None = None  # set in a process of an elastic job


_process = _Process()


def current_job() -> Job:
    """Return the job that the calls of this thread use. Raises NotInitialized (a ValueError) if there is no job."""
    job = _process.job
    if _process.worlds:  # if False, no thread has its own job, and the lookup can be skipped
        job = getattr(_process.thread, "job", None) or job
    if job is None or job.closed:
        raise NotInitialized("ddl has not been initialized; call init() first")
    return job


def present_job() -> Job | None:
    """Return the job of this process, or None if there is none.

    This function takes no lock and never raises an error, so signal handlers may call it.
    """
    return _process.job


def elastic_member() -> ElasticMember | None:
    """Return the object that makes this process a member of one world after another; None if the job is not elastic."""
    member: ElasticMember | None = getattr(_process.thread, "member", None)
    return member or _process.member


def enter_world(job: Job) -> None:
    """Start ``job`` and make it the current job. ``job`` is this process's job in the next world of an elastic job.

    Raises the same errors as ``Job.start``.
    """
    with _changing():
        job.start()
        if getattr(_process.thread, "job", None) is not None:
            _process.thread.job = job
        else:
            _process.job = job
        atexit.unregister(_at_exit)  # registered last, as after ``init``
        atexit.register(_at_exit)


def leave_world(reason: str) -> None:
    """End this rank's part of the present world of an elastic job. A second call has no effect.

    ``reason``: why this rank leaves; errors on other ranks show this text.
    """
    job = getattr(_process.thread, "job", None) or _process.job
    if job is not None:
        job.shutdown(reason)


def job_of(service: JobService) -> Job:
    """Return ``service`` unchanged, with the type Job for type checkers.

    JobService is a protocol that contains only those methods of a Job that an adapter may use. Every object of type
    JobService is a Job.
    """
    return cast("Job", service)


@contextmanager
def use_job(job: Job, member: ElasticMember | None = None) -> Iterator[Job]:
    """Make ``job`` the current job of this thread within the ``with`` block.

    If the ranks of a world are threads, each thread needs this, because each thread has its own job. ``member``: the
    object that makes the thread a member of one world after another, if the job is elastic; otherwise None.
    """
    before = getattr(_process.thread, "job", None), getattr(_process.thread, "member", None)
    _process.thread.job, _process.thread.member = job, member
    _process.worlds = True
    try:
        yield job
    finally:
        _process.thread.job, _process.thread.member = before


class ProcessSet:
    """Some ranks of the world, which run collectives among themselves.

    ``ranks`` are ranks of the world, in rising order. ``process_set_id`` is None until the set is registered.
    """

    process_set_id: int | None

    def __init__(self, ranks: Sequence[int]) -> None:
        try:
            given = [int(rank) for rank in ranks]
        except TypeError:
            raise InvalidArgument(f"ProcessSet takes a sequence of ranks, not {type(ranks).__name__}") from None
        if len(set(given)) != len(given):
            raise InvalidArgument(f"process set with duplicate rank in {given}")
        self.ranks = sorted(given)
        self.process_set_id = None

    def resolve(self, job: JobService) -> tuple[int, tuple[int, ...]]:
        """Return the id of this set and its members, as ranks of the world.

        Raises ValueError if this set is not registered in ``job``, or if this rank is not a member.
        """
        set_id = self.process_set_id
        members = None if set_id is None else job.members(set_id)
        if set_id is None or members is None:
            raise InvalidArgument(f"{self} is not registered in this job; pass it to init() or add_process_set() first")
        if job.rank not in members:
            raise InvalidArgument(f"rank {job.rank} is not a member of {self}; only members may call")
        return set_id, members

    def size(self) -> int | None:
        """Return the number of members, or None if this set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the position of this process among the members, or None if this set is not registered.

        Raises ValueError if this process is not a member.
        """
        if self.process_set_id is None:
            return None
        return self.resolve(current_job())[1].index(current_job().rank)

    def included(self) -> bool | None:
        """Return whether this process is a member, or None if this set is not registered."""
        return None if self.process_set_id is None else current_job().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """The process set that contains all ranks of the current world."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]  # changes with the current world
        return list(range(current_job().size)) if is_initialized() else []

    def size(self) -> int:
        return current_job().size


global_process_set: ProcessSet = _GlobalProcessSet()


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Start the job. Every rank of the world must call this. The call returns when all ranks have called it.

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
    if is_initialized():
        return
    _refuse_children()
    if _process.pid != os.getpid():
        _process.changing = Lock()  # after a fork: the thread that may have held the lock is not in this process
    if on_own_thread():  # another thread may be inside ``init``, and wait for this one
        raise reentrant("init()")
    changing = _changing()
    changing.refuse("init()")
    with changing:
        if not is_initialized():
            _init(comm, process_sets)


def _changing() -> Lock:
    """Return the lock that ``init`` and ``shutdown`` acquire, so that only one of them runs at a time.

    If the ranks of a world are threads, each thread has its own lock. With one lock for all, the threads would block
    each other: ``init`` in one thread waits until all other threads are in ``init``, too, and the same is true for
    ``shutdown``.
    """
    if getattr(_process.thread, "job", None) is None:
        return _process.changing
    lock: Lock | None = getattr(_process.thread, "changing", None)
    if lock is None:
        lock = _process.thread.changing = Lock()
    return lock


def _init(comm: Any, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    if _process.pid != os.getpid():
        _process.pid = os.getpid()
        atexit.register(_at_exit)
        before_threads_are_joined(_at_end_of_main_thread)
    job = _make_job(comm)
    job.start()
    if getattr(_process.thread, "job", None) is not None:
        _process.thread.job = job
    else:
        _process.job = job
    atexit.unregister(_at_exit)  # register it last: then it runs before the handlers of libraries that the job loaded
    atexit.register(_at_exit)
    Environment.mark_children(True, external=_process.external_rank is not None)
    if process_sets is not None and process_sets != "dynamic":
        _register(process_sets)


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
        _shut_down()
        raise


def _refuse_children() -> None:
    parent = Environment.child_of()
    if parent:
        raise DdlInternalError(
            f"init() was called in a process that a rank (process {parent}) has started; "
            "only the processes that the launcher started take part"
        )


def _make_job(comm: Any) -> Job:
    environment = Environment.read()
    registry = None
    if environment is None and _process.external_rank is None:
        _process.external_rank, registry = detect(os.environ)
    external_rank = _process.external_rank
    launched: Placement | RankInfo = Placement(0, (0,))
    if environment is not None:
        launched = environment.placement
    elif external_rank is not None:
        launched = external_rank.rank_info
    if environment is not None and environment.elastic:
        if comm is not None:
            raise InvalidArgument("init: an elastic job (ddl run --min-np) has one world; leave comm out")
        before, _process.member = elastic_job(environment)
        return before
    ranks = None if comm is None else _ranks_of(comm, launched)
    if environment is None and external_rank is None:
        return lone_job(registry)
    if ranks is not None and launched.rank not in ranks:
        raise InvalidArgument(
            f"init: rank {launched.rank} is not in comm={list(ranks)}; call init(comm=…) only on its ranks"
        )
    ordinal = _process.ordinals.get(ranks, 0) + 1
    if environment is not None:
        job = launched_job(environment, ranks, ordinal)
    else:
        assert external_rank is not None
        job = external_rank.job(ranks, ordinal)
    _process.ordinals[ranks] = ordinal  # only after success, so that a retry uses the same ordinal as before
    return job


def _ranks_of(comm: Any, launched: Placement | RankInfo) -> tuple[int, ...] | None:
    if not isinstance(comm, (list, tuple, range)):
        comm = _ranks_of_communicator(comm, launched)
    ranks = tuple(int(rank) for rank in comm)
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
                f"library; for {library}'s: {pip_install(plugin)}"
                if plugin
                else "library, for which that library's plugin is needed"
            )
        )
    ranks: Sequence[int] = registry.load(provider)().ranks_of(comm, launched.rank, launched.size)
    return ranks


def shutdown() -> None:
    """End this rank's part of the job.

    The call has no effect before ``init`` or if the job has already ended. Unfinished operations raise Closed in the
    threads that wait for them. Any thread may call this while other threads wait. A signal handler may call this, too.
    But if the signal has interrupted another call of ddl in the same thread, ReentrantCall is raised and nothing
    changes. The same holds for a finalizer on one of ddl's own threads. If the setting ``verify_every`` is not 0, the
    call waits for the last comparison of the parameters, and raises ReplicasDiffer if the parameters differ.
    """
    job = getattr(_process.thread, "job", None) or _process.job
    changing = _changing()
    if changing.held():
        if job is not None and job.closed:
            return  # a signal handler has interrupted a shutdown of this thread
        raise reentrant("shutdown()")
    if on_own_thread() or (job is not None and not job.closed and job.inside()):
        raise reentrant("shutdown()")  # checked before the lock is taken: its holder may be waiting for this thread
    with changing:
        _shut_down()


def _shut_down() -> None:
    job = getattr(_process.thread, "job", None) or _process.job
    try:
        if job is not None:
            job.shutdown(settle=True)
    finally:
        if getattr(_process.thread, "job", None) is None:
            _process.job = None
            Environment.mark_children(False)


def _at_exit() -> None:
    if os.getpid() != _process.pid:
        return  # a forked child runs its parent's handlers, but is not a rank
    job, error = _process.job, getattr(sys, "last_value", None)
    reason = f"raised {type(error).__name__}: {error}" if error is not None else "ended its script without shutdown()"
    try:
        if job is not None:
            job.shutdown(reason, settle=error is None)
    finally:
        if _process.external_rank is not None:
            _process.external_rank.close(reason, patient=error is None)


def _at_end_of_main_thread() -> None:
    """Make this rank leave the job if the main thread has ended while other threads still run.

    Without this function, the rank might stay in the job forever, because the interpreter waits for these threads
    before it runs the ``atexit`` handlers. If an uncaught exception has ended the main thread, this rank leaves at
    once. Otherwise, this rank leaves only if operations are in flight and none of them completes for
    ``leave_timeout_s``; the other ranks get the reason.
    """
    job = _process.job
    if job is None or job.closed or os.getpid() != _process.pid:
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        job.shutdown(f"raised {type(error).__name__}: {error}")
        return
    if not others_are_alive():
        return
    try:
        threading.Thread(target=_watch_threads, args=(job,), name="ddl-last", daemon=True).start()
    except RuntimeError:  # this version of Python cannot start threads at this point
        job.shutdown("ended its main thread without shutdown()")


def _watch_threads(job: Job) -> None:
    patience_s = job.settings.number("leave_timeout_s")
    try:
        progress, since_s = job.progress(), time.monotonic()
    except NotInitialized:  # an elastic job in no world yet: no operation can be waited for
        return
    while not job.closed:
        time.sleep(0.1)
        seen, waits = job.progress(), job.tensor_queue.pending()
        if seen != progress or not waits:
            progress, since_s = seen, time.monotonic()
        elif time.monotonic() - since_s > patience_s:
            job.shutdown(
                f"ended its main thread while another one waited for {waits[0]!r}, which did not come within "
                f"{patience_s:g} s (DDL_LEAVE_TIMEOUT_S); join such threads at the end of the script"
            )


def is_initialized() -> bool:
    """Return whether a job is running: after ``init`` and before ``shutdown``. This function never raises an error."""
    job = getattr(_process.thread, "job", None) or _process.job
    return job is not None and not job.closed


def size() -> int:
    """Return the number of ranks in the world. Raises NotInitialized (a ValueError) before ``init``."""
    return current_job().size


def rank() -> int:
    """Return the rank of this process in the world. Raises NotInitialized (a ValueError) before ``init``."""
    return current_job().rank


def local_size() -> int:
    """Return the number of ranks on this host. Raises NotInitialized (a ValueError) before ``init``."""
    return current_job().local_size


def local_rank() -> int:
    """Return the number of this process among the ranks of its host, from 0.

    Raises NotInitialized (a ValueError) before ``init``.
    """
    return current_job().local_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with the same local rank as this process.

    Raises NotInitialized (a ValueError) before ``init``.
    """
    return current_job().cross_size


def cross_rank() -> int:
    """Return the number of this host, from 0, among the hosts that have a rank with the local rank of this process.

    Raises NotInitialized (a ValueError) before ``init``.
    """
    return current_job().cross_rank


def is_homogeneous() -> bool:
    """Return whether every host runs the same number of ranks. Raises NotInitialized (a ValueError) before ``init``."""
    return current_job().is_homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, and return it as a ProcessSet.

    Every rank of the world must call this, including ranks that are not members. The call returns when all ranks have
    called it. ``process_set``: a ProcessSet, or the ranks of its members. Raises ValueError if a set with the same
    members is registered already or if a rank does not exist. Raises MismatchError if the ranks pass different members.
    """
    job = current_job()
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if one.process_set_id is not None and job.sets.members(one.process_set_id) is not None:
        raise InvalidArgument(f"{one} is registered already")
    wrong = [member for member in one.ranks if not 0 <= member < job.size]
    if wrong or not one.ranks:
        raise InvalidArgument(
            f"process set with invalid rank: {wrong or 'it is empty'}; the world has ranks 0 to {job.size - 1}"
        )
    if one.ranks in job.sets.ids_and_ranks().values():
        raise InvalidArgument(f"a process set with ranks {one.ranks} exists already; use that one")
    spec = Spec(Kind.ADD_SET, ranks=tuple(one.ranks))
    one.process_set_id = _change_sets(job, spec)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set from the job. Every rank of the world must call this.

    Return True if the set was removed. Return False if the set is the global process set or is not registered.
    """
    job = current_job()
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0 or job.sets.members(set_id) is None:
        return False
    _change_sets(job, Spec(Kind.REMOVE_SET, ranks=(set_id,)))
    process_set.process_set_id = None
    return True


def _change_sets(job: Job, spec: Spec) -> int:
    handle = Handle(job.waiter, 1, lambda outcomes: -1 if outcomes[0] is None else outcomes[0].result)
    job.submit([Entry(handle, 0, 0, ANONYMOUS, spec, encode(spec))])
    return int(handle.wait())


def process_sets() -> dict[int, list[int]]:
    """Return the registered process sets as a dict that maps the id of a set to the ranks of its members."""
    return current_job().sets.ids_and_ranks()


def stats() -> Stats:
    """Return the counters of this rank since ``init``: messages, buckets, bytes, seconds, and the transports in use.

    ``Stats`` documents the keys. Any thread may call this, and so may signal handlers and finalizers. The counters are
    always updated, so only the call itself costs time.
    """
    return current_job().stats()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to record a timeline of all ranks. Every rank must call this with the same file. Any thread may call this.

    ``file_path``: the file for the timeline. ``mark_cycles``: mark in the timeline where each period of a schedule
    begins. Until ``stop_timeline`` or the end of the job, each rank writes its part to a directory beside the file.
    Raises NotInitialized (a ValueError) before ``init``. Raises ValueError if a timeline is already being recorded or
    the file cannot be written.
    """
    current_job().start_timeline(str(file_path), bool(mark_cycles))


def stop_timeline() -> None:
    """Stop recording the timeline that ``start_timeline`` began. Every rank must call this.

    The call has no effect if no timeline is being recorded. Rank 0 waits at most 10 s for the parts of the other ranks,
    and merges all parts into the file. A warning in the log names the ranks whose parts are missing. Raises
    NotInitialized (a ValueError) before ``init``, and ReentrantCall in a signal handler or a finalizer that has
    interrupted another call of ddl, or that runs on one of ddl's own threads.
    """
    current_job().stop_timeline()
