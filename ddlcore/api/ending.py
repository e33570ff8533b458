"""Ends this rank's part of the job: by ``shutdown``, at the end of the program, or when its main thread has ended."""

from __future__ import annotations

import os
import sys
import threading
import time

from ddlcore.api.threads import others_are_alive
from ddlcore.api.world import PROCESS
from ddlcore.errors import NotInitialized
from ddlcore.process.environment import Environment
from ddlcore.process.job import Job
from ddlcore.reentry import reentrant
from ddlcore.threads import on_own_thread

__all__ = ["at_end_of_main_thread", "at_exit", "leave_world", "shut_down", "shutdown"]


def shutdown() -> None:
    """End this rank's part of the job.

    The call has no effect before ``init`` or if the job has already ended. Unfinished operations raise Closed in the
    threads that wait for them. Any thread may call this while other threads wait. A signal handler may call this, too.
    But if the signal has interrupted another call of ddl in the same thread, ReentrantCall is raised and nothing
    changes. The same holds for a finalizer on one of ddl's own threads. If the setting ``verify_every`` is not 0, the
    call waits for the last comparison of the parameters, and raises ReplicasDiffer if the parameters differ.
    """
    job = PROCESS.own_job
    changing = PROCESS.lock()
    if changing.held():
        if job is not None and job.closed:
            return  # a signal handler has interrupted a shutdown of this thread
        raise reentrant("shutdown()")
    if on_own_thread() or (job is not None and not job.closed and job.inside()):
        raise reentrant("shutdown()")  # checked before the lock is taken: its holder may be waiting for this thread
    with changing:
        shut_down()


def leave_world(reason: str) -> None:
    """End this rank's part of the present world of an elastic job. A second call has no effect.

    ``reason``: why this rank leaves; errors on other ranks show this text.
    """
    job = PROCESS.own_job
    if job is not None:
        job.shutdown(reason)


def shut_down() -> None:
    """End this rank's part of the job, because ``shutdown`` was called or ``init`` has failed after the start.

    The caller holds ``PROCESS.lock()``.
    """
    job = PROCESS.own_job
    try:
        if job is not None:
            job.shutdown(settle=True)
    finally:
        if not PROCESS.has_world_of_threads():
            PROCESS.job = None
            Environment.mark_children(False)


def at_exit() -> None:
    """End this rank's part of the job at the end of the program. ``init`` registers this function with ``atexit``."""
    if os.getpid() != PROCESS.pid:
        return  # a forked child runs its parent's handlers, but is not a rank
    job, error = PROCESS.job, getattr(sys, "last_value", None)
    reason = f"raised {type(error).__name__}: {error}" if error is not None else "ended its script without shutdown()"
    try:
        if job is not None:
            job.shutdown(reason, settle=error is None)
    finally:
        if PROCESS.external_rank is not None:
            PROCESS.external_rank.close(reason, patient=error is None)


def at_end_of_main_thread() -> None:
    """Make this rank leave the job if the main thread has ended while other threads still run.

    Without this function, the rank might stay in the job forever, because the interpreter waits for these threads
    before it runs the ``atexit`` handlers. If an uncaught exception has ended the main thread, this rank leaves at
    once. Otherwise, this rank leaves only if operations are in flight and none of them completes for
    ``leave_timeout_s``; the other ranks get the reason.
    """
    job = PROCESS.job
    if job is None or job.closed or os.getpid() != PROCESS.pid:
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
        seen, waits = job.progress(), job.lookout.pending()
        if seen != progress or not waits:
            progress, since_s = seen, time.monotonic()
        elif time.monotonic() - since_s > patience_s:
            job.shutdown(
                f"ended its main thread while another one waited for {waits[0]!r}, which did not come within "
                f"{patience_s:g} s (DDL_LEAVE_TIMEOUT_S); join such threads at the end of the script"
            )
