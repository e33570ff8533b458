"""Runs a training function in one world after another, until the function has reached its end."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ddlcore.api.beginning import enter_world
from ddlcore.api.elastic.state import State
from ddlcore.api.ending import leave_world
from ddlcore.api.objects import barrier
from ddlcore.api.world import current_job, elastic_member
from ddlcore.errors import DdlInternalError, DeadlineExceeded, HostsUpdatedInterrupt, PeerLost, TransportError
from ddlcore.process.elastic_member import ElasticMember
from ddlcore.process.job import Job

__all__ = ["run"]

log = logging.getLogger("ddl")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)
_BARREN = 10  # give up after so many worlds in a row in which no step was applied and no rank was lost


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function, so that it goes on in a new world when ranks are lost and when new ranks join.

    The first argument of ``func`` is an elastic state: an ``ObjectState``, or the elastic state of a framework. All
    ranks must call the decorated function after ``init()``. Before each call of ``func``, all ranks copy the state
    of the rank that has applied the most steps. ``func`` is called again in two cases: ranks were lost, or ranks
    were waiting to join when all ranks called ``state.commit()``. In each call, ``func`` must continue from the
    values in the state. The decorated function returns the result of ``func``.

    If the job is not elastic (``ddl run`` without ``--min-np``, or no launcher), ``func`` is called once. An error
    that would occur again is raised, and does not start a new world. Examples are a bug in ``func``, MismatchError,
    Closed, and a wrong argument. Raises DdlInternalError if fewer ranks than ``--min-np`` are left.
    """

    @functools.wraps(func)
    def called(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        member = elastic_member()
        if member is None:
            current_job()  # raises NotInitialized
            state.enter(0, 0)
            return func(state, *args, **kwargs)
        return _train(member, state, lambda: func(state, *args, **kwargs))

    return called


def _train(member: ElasticMember, state: State, call: Callable[[], R]) -> R:
    reason, again = "", 0
    if state.is_torn:  # an earlier call has ended with an error, and the other ranks have gone back meanwhile
        state.restore()
        state.is_torn = False
    barren = 0  # see _BARREN
    results: list[R] = []  # of the last call, if it has returned
    while True:
        steps = state.steps
        leave_world(reason or "waits for the next world")
        job = member.next_job(state.registered_steps, reason, again)
        if job is None:
            if results:
                return results[0]
            log.info("elastic: %s", member.dismissed or "the training ended before this process could join it")
            sys.exit(0)
        results.clear()
        world = member.world
        assert world is not None
        enters = True
        given_up = again  # if this world is lost before the function is called, this still has to be computed again
        try:
            enter_world(job)
            enters = False
            state.enter(world.members.index(world.root), world.before)
            member.began()
            given_up = 1  # the step in flight, if the function raises an error
            results.append(call())
            given_up = 0
            _check(job)
            barrier(job=job)  # otherwise a rank could end while another one still needs its state
            member.finished(job)
            return results[0]
        except HostsUpdatedInterrupt:
            reason, again = "", 0
            leave_world("has come to an agreed call")
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, SystemExit) and not error.code:
                raise  # this rank ends as it should, and others may still complete what it has begun with them
            cause = _mendable(error, job, enters)
            barren = 0 if state.steps > steps or isinstance(cause, PeerLost) else barren + 1
            text = f"raised {type(error).__name__}: {error}".partition("\n")[0]
            if cause is None or barren >= _BARREN:
                # The other ranks need this one, so it is lost for all of them, at once. If only the operations that need
                # it failed, a framework could wrap their errors, and then nobody would know that they can be mended.
                # A script that catches the error may still ask for its rank, for example to save a checkpoint.
                state.is_torn = True
                job.break_off(text)
                raise
            if cause is not error:
                log.info("elastic: rank %d %s", job.rank, text)
            reason = str(cause).partition("\n")[0]
            log.info("elastic: rank %d leaves its world: %s", job.rank, reason)
            leave_world(f"raised {type(error).__name__}: {reason}")
            applied = state.steps
            state.restore()
            again = applied - state.steps + (0 if state.is_between_steps else given_up)


def _check(job: Job) -> None:
    """Raise the error with which ``job`` has failed, if any. The user's function may have caught that error."""
    error = job.failed_with()
    if error is not None:
        raise error


def _mendable(error: BaseException, job: Job, enters: bool = False) -> BaseException | None:
    """Return the error that made the training stop, if the training can go on in a new world; otherwise None.

    Examples of such errors are a lost rank and a failed transport. If ``job`` has failed, return the error of ``job``
    and not ``error``, because frameworks wrap errors in other classes. ``enters`` is true if the process was still
    entering the world.
    """
    if not isinstance(error, Exception):
        return None  # somebody wants this process to end
    is_shown, failed = job.has_shown_failure(), job.failed_with()
    same = f"raised {type(error).__name__}:"
    if isinstance(failed, PeerLost) and failed.reason.startswith(same) and not is_shown:
        failed = None  # this function has not seen it: another rank has run into the same fault just before
    cause = failed or error
    # Scripts raise DdlInternalError itself to begin anew. The errors of its other subclasses would occur again.
    mendable = isinstance(cause, (PeerLost, TransportError)) or type(cause) is DdlInternalError
    # Whoever hangs does not come to the next world, and is evicted.
    late = isinstance(cause if enters else failed, DeadlineExceeded) and job.settings.number("evict_after_s") > 0
    return cause if mendable or late else None
