"""Keeps the current job, which the collectives use, and returns its ranks and sizes, counters and timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from ddlcore.contracts.framework import JobService
from ddlcore.errors import NotInitialized
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.process.job import Job
from ddlcore.reentry import Lock
from ddlcore.runtime.meter import Stats

if TYPE_CHECKING:
    from ddlcore.process.elastic_member import ElasticMember
    from ddlcore.process.external_rank import ExternalRank

__all__ = [
    "PROCESS",
    "cross_rank",
    "cross_size",
    "current_job",
    "elastic_member",
    "is_homogeneous",
    "is_initialized",
    "job_of",
    "local_rank",
    "local_size",
    "present_job",
    "rank",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "use_job",
]


class _Process:
    """The present job of this process, and the values that the process keeps from one job to the next.

    Only beginning.py, ending.py, framework_groups.py and ``use_job`` change these values.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.ordinals: dict[tuple[LaunchedRank, ...] | None, int] = {}
        self.thread = threading.local()  # .job: in a world of threads, the job of this thread
        self.worlds = False  # whether any thread has ever had its own job
        self.pid = 0
        self.changing = Lock()  # held during ``init`` and ``shutdown``, so that only one of them runs at a time
        self.external_rank: ExternalRank | None = None  # set if another launcher has started this process
        self.member: ElasticMember | None = None  # set in a process of an elastic job

    @property
    def own_job(self) -> Job | None:
        """The job of the calling thread, even if the job has ended; None if there is none."""
        return getattr(self.thread, "job", None) or self.job

    def has_world_of_threads(self) -> bool:
        """Return whether the calling thread is a rank of a world whose ranks are threads."""
        return getattr(self.thread, "job", None) is not None

    def lock(self) -> Lock:
        """Return the lock that ``init`` and ``shutdown`` acquire, so that only one of them runs at a time.

        If the ranks of a world are threads, each thread has its own lock. With one lock for all, the threads would
        block each other: ``init`` in one thread waits until all other threads are in ``init``, too, and the same is
        true for ``shutdown``.
        """
        if not self.has_world_of_threads():
            return self.changing
        lock: Lock | None = getattr(self.thread, "changing", None)
        if lock is None:
            lock = self.thread.changing = Lock()
        return lock


PROCESS = _Process()


def current_job() -> Job:
    """Return the job that the calls of this thread use. Raises NotInitialized (a ValueError) if there is no job."""
    job = PROCESS.job
    if PROCESS.worlds:  # if False, no thread has its own job, and the lookup can be skipped
        job = getattr(PROCESS.thread, "job", None) or job
    if job is None or job.closed:
        raise NotInitialized("ddl has not been initialized; call init() first")
    return job


def present_job() -> Job | None:
    """Return the job of this process, or None if there is none.

    This function takes no lock and never raises an error, so signal handlers may call it.
    """
    return PROCESS.job


def elastic_member() -> ElasticMember | None:
    """Return the object that makes this process a member of one world after another; None if the job is not elastic."""
    member: ElasticMember | None = getattr(PROCESS.thread, "member", None)
    return member or PROCESS.member


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
    before = getattr(PROCESS.thread, "job", None), getattr(PROCESS.thread, "member", None)
    PROCESS.thread.job, PROCESS.thread.member = job, member
    PROCESS.worlds = True
    try:
        yield job
    finally:
        PROCESS.thread.job, PROCESS.thread.member = before


def is_initialized() -> bool:
    """Return whether a job is running: after ``init`` and before ``shutdown``. This function never raises an error."""
    job = PROCESS.own_job
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
    return current_job().placement.cross_size


def cross_rank() -> int:
    """Return the number of this host, from 0, among the hosts that have a rank with the local rank of this process.

    Raises NotInitialized (a ValueError) before ``init``.
    """
    return current_job().placement.cross_rank


def is_homogeneous() -> bool:
    """Return whether every host runs the same number of ranks. Raises NotInitialized (a ValueError) before ``init``."""
    return current_job().placement.is_homogeneous


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
    the file cannot be written, and PluginError if the package ddl-doctor, which records timelines, is not installed.
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
