"""Functions for a framework that has ranks and groups of ranks of its own.

ddl's job uses the framework's ranks, and each of the groups becomes a process set.

``ddlcore.api`` does not import this module, because most ranks need none of it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddlcore.api.beginning import begin
from ddlcore.api.objects import submit_control
from ddlcore.api.process_set import ProcessSet, change_sets
from ddlcore.api.world import PROCESS, current_job, is_initialized, rank, size
from ddlcore.contracts.store import PrefixStore, Store
from ddlcore.errors import InvalidArgument
from ddlcore.messages.spec import Spec
from ddlcore.plug.settings import settings_of
from ddlcore.process.environment import Environment
from ddlcore.process.jobs import lone_job
from ddlcore.reentry import reentrant
from ddlcore.runtime.handle import Handle
from ddlcore.runtime.request import ANONYMOUS
from ddlcore.threads import on_own_thread
from ddlcore.types import Kind

if TYPE_CHECKING:
    from ddlcore.contracts.cluster import RankInfo
    from ddlcore.plug.registry import Registry
    from ddlcore.process.job import Job

__all__ = [
    "add_members_set",
    "barrier_async",
    "failure",
    "has_rank",
    "init_as",
    "is_launched",
    "leave_launch",
    "remove_members_set",
    "world_store",
]


def has_rank() -> bool:
    """Return whether this process has a rank already: its job runs or has run, or ``ddl run`` has started it."""
    return is_initialized() or PROCESS.external_rank is not None or is_launched()


def is_launched() -> bool:
    """Return whether a launcher of ddl has started this process."""
    return Environment.read() is not None


def init_as(
    rank_info: RankInfo, cluster: str, defaults: Mapping[str, str], registry: Registry | None = None
) -> Registry:
    """Start the job as ``init`` does, with a rank that is known from elsewhere than from environment variables.

    Every rank of ``rank_info.launch`` must call this. A rank alone starts a world of its own, even if a launcher has
    given it another rank. ``cluster``: the name of what has given the rank, for messages.
    ``defaults``: values of settings (``{"DDL_STALL_SHUTDOWN_S": "60"}``) for which there is no environment variable. If
    ``ddl run`` has started this process, only those settings that a rank reads have an effect; if its job runs already,
    none has. ``registry``: what an earlier call of this function has returned; None: load the plugins. Returns the
    registry of the job. Raises ValueError if this process has another rank already.
    """
    environ = {**defaults, **dict(os.environ)}
    known = has_rank()
    if not known and rank_info.size > 1:
        from ddlcore.process.external_rank import ExternalRank  # imports ZeroMQ, see detection.py

        settings, registry = settings_of(environ, registry=registry, warns=False)
        PROCESS.external_rank = ExternalRank(cluster, rank_info, settings, registry, environ)
    alone = rank_info.size == 1 and not known
    begin(None, None, environ, (lambda: lone_job(registry, environ)) if alone else None)
    here = (rank(), size())
    if here != (rank_info.rank, rank_info.size):
        raise InvalidArgument(
            f"{cluster} asks for rank {rank_info.rank} of {rank_info.size}, but this process is rank {here[0]} of "
            f"{here[1]} in ddl's job; give the same numbers, or leave ddl's launcher out"
        )
    return current_job().registry


def leave_launch(reason: str, patience_s: float) -> None:
    """End this rank's part of the job, and forget which rank a launcher other than ddl's has given to this process.

    Then this process may get another rank, in another job. The other ranks are not waited for, not even if the
    coordinator runs in this process. If they need this rank or the coordinator, they raise PeerLost with ``reason``, a
    text. ``patience_s``: as for ``Job.shutdown``. Raises ReentrantCall, and changes nothing, where ``shutdown`` does.
    """
    job, changing = PROCESS.job, PROCESS.lock()
    if changing.held() or on_own_thread() or (job is not None and not job.closed and job.inside()):
        raise reentrant("leave_launch()")  # before the lock is taken: its holder may be waiting for this thread
    with changing:
        external_rank = PROCESS.external_rank
        try:
            if job is not None:
                job.shutdown(reason, patience_s=patience_s)
        finally:
            PROCESS.job = PROCESS.external_rank = None
            PROCESS.ordinals.clear()
            Environment.mark_children(False)
            if external_rank is not None:
                external_rank.close(reason, patient=False)


def failure() -> BaseException | None:
    """Return the error with which the present job has failed. None if it has not failed, or if there is no job."""
    job = PROCESS.own_job
    return None if job is None else job.failed_with()


def world_store(prefix: str) -> Store:
    """Return the part of this world's store whose keys begin with ``prefix``. No other world sees its values."""
    return PrefixStore(prefix, current_job().world_store)


class _MembersSet(ProcessSet):
    """A process set that is registered only until its job ends: the next job may give its number to another set."""

    def __init__(self, ranks: Sequence[int], job: Job) -> None:
        self._job = weakref.ref(job)
        super().__init__(ranks)

    @property
    def process_set_id(self) -> int | None:
        job = self._job()
        return None if job is None or job.closed else self._number

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        self._number = number


def add_members_set(ranks: Sequence[int], label: str) -> ProcessSet:
    """Register a process set that only its members know, and return it. Only the members must call this.

    There may be other process sets with the same ranks. ``ranks``: different ranks of the world, equal on all members;
    results are in their order. ``label``: a text that is equal on all members, and that belongs to no other such call
    until this call has returned. Raises MismatchError if this rank is not one of ``ranks``.
    """
    job = current_job()
    one = _MembersSet(ranks, job)
    one.ranks = list(ranks)
    spec = Spec(Kind.ADD_SET, ranks=tuple(one.ranks), of_members=True)
    one.process_set_id = change_sets(job, spec, f"add {label}")
    return one


def remove_members_set(process_set: ProcessSet) -> None:
    """Remove a process set that ``add_members_set`` has registered. All of its members must call this."""
    set_id = process_set.process_set_id
    if set_id is not None:
        change_sets(current_job(), Spec(Kind.REMOVE_SET, ranks=(set_id,), of_members=True), f"remove {set_id}")
        process_set.process_set_id = None


def barrier_async(process_set: ProcessSet, waits: bool = False) -> Handle:
    """Start a barrier of the process set. The wait of its handle ends when every member has started it.

    ``waits``: the caller waits for the handle next.
    """
    job = current_job()
    return submit_control(job, process_set.resolve(job)[0], ANONYMOUS, Spec(Kind.BARRIER), waits)
