"""Runs a training function again and again, in one world after the other, until it has reached its end."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ddlcore.api.elastic.state import State
from ddlcore.api.objects import barrier
from ddlcore.api.world import current_job, elastic_member, enter_world, leave_world
from ddlcore.elastic_member import ElasticMember
from ddlcore.errors import DdlInternalError, DeadlineExceeded, HostsUpdatedInterrupt, PeerLost, TransportError
from ddlcore.job import Job

__all__ = ["run"]

log = logging.getLogger("ddl")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)
_BARREN = 10  # worlds in a row in which no step was applied, although no rank was lost: nothing will change any more


def run(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return ``function`` so that it goes on in another world when ranks are lost, and when ranks join.

    The first argument of ``function`` is an elastic state (``ObjectState``, or that of a framework). Before each call, all
    ranks take over the state of the rank that has applied the most steps. If ranks are lost, or new ranks wait at a call
    of ``state.commit()``, the function is called again, and must go on from what is in the state. All ranks must call
    this, after ``init()``, and return what ``function`` returns.

    Under ``ddl run`` without ``--min-np``, and without a launcher, the function is called once. Errors that would come
    again are raised: a bug of the function, MismatchError, Closed, a wrong argument. Raises DdlInternalError if fewer
    ranks than ``--min-np`` are left.
    """

    @functools.wraps(function)
    def called(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        member = elastic_member()
        if member is None:
            current_job()  # raises NotInitialized
            state.enter(0, 0)
            return function(state, *args, **kwargs)
        return _train(member, state, lambda: function(state, *args, **kwargs))

    return called


def _train(member: ElasticMember, state: State, call: Callable[[], R]) -> R:
    reason, again = "", 0
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
        given_up = again  # if this world is lost before the function is called, this still has to be computed again
        try:
            enter_world(job)
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
        except Exception as error:
            cause = _mendable(error, job)
            barren = 0 if state.steps > steps or isinstance(cause, PeerLost) else barren + 1
            if cause is None or barren >= _BARREN:
                raise
            reason = str(cause).partition("\n")[0]
            log.info("elastic: rank %d leaves its world: %s", job.rank, reason)
            leave_world(f"raised {type(error).__name__}: {reason}")
            applied = state.steps
            state.restore()
            again = applied - state.steps + (0 if state.is_between_steps else given_up)


def _check(job: Job) -> None:
    """Raise the error with which ``job`` has failed, if the user's function has swallowed it."""
    error = job.failed_with()
    if error is not None:
        raise error


def _mendable(error: Exception, job: Job) -> BaseException | None:
    """Return the error that a new world can mend, if ``error`` is one or is the consequence of one; otherwise None.

    Frameworks wrap errors, so what the job says counts more than the class of ``error``.
    """
    failed = job.failed_with()
    cause = failed or error
    # DdlInternalError itself is what scripts raise by hand to begin anew; its other subclasses would come again.
    mendable = isinstance(cause, (PeerLost, TransportError)) or type(cause) is DdlInternalError
    stalled = isinstance(failed, DeadlineExceeded) and job.settings.number("evict_after_s") > 0
    return cause if mendable or stalled else None
