"""Keeps the persistent requests of blocking calls with names, and runs them again for later calls with the same name."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ddlcore.process.job import Job
from ddlcore.runtime.outcome import Outcome
from ddlcore.runtime.request import Given, PersistentMove

__all__ = ["PERSISTENT_LIMIT", "kept_request", "run_request"]

PERSISTENT_LIMIT = 1024  # names used by blocking calls; a training loop uses few


def kept_request(job: Job, key: Hashable, how: Any, make: Callable[[], PersistentMove]) -> PersistentMove:
    """Return the request that an earlier call has kept under ``key``, or else a new one, which ``make`` returns.

    ``how`` is what must be equal for a request to be used again. It is compared by its value, so it must not contain
    objects whose value may change.
    """
    request = job.persistent_requests.get(key)
    if not isinstance(request, PersistentMove) or request.how != how:
        request = make()
        request.how = how
        if len(job.persistent_requests) >= PERSISTENT_LIMIT:
            job.retire()
        job.persistent_requests[key] = request
    return request


def run_request(job: Job, request: PersistentMove, given: Given) -> Outcome:
    """Start ``request`` for the tensors in ``given``, wait until it has ended, and return the outcome.

    Raises the error of the operation. The outcome of a broadcast is None, and its caller does not use it.
    """
    try:
        job.start_and_wait(request, 0, given)
    except Exception:
        if not given.done:  # otherwise it is the error of a later call with the same name, on another thread
            raise
    if not given.done:
        assert given.error is not None
        raise given.error.with_traceback(None)
    outcome: Outcome = given.outcome
    return outcome
