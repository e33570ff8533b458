"""Functions with which the optimizers of all frameworks reduce gradients.

They find the members of a process set, check arguments, and wait for all handles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ddlcore.api.handles import Waitable
from ddlcore.api.process_set import ProcessSet, global_process_set, process_sets
from ddlcore.contracts.framework import JobService
from ddlcore.errors import DdlInternalError
from ddlcore.types import Average, ReduceOp

__all__ = ["Membership", "check_predivide", "find_process_set", "membership", "wait_for_all"]


class Membership(NamedTuple):
    """The ranks that take part in the reductions over a process set.

    ``active`` is true if this rank must reduce: it is a member, and there is at least one other member.
    """

    ranks: tuple[int, ...]  # the members, whether or not this rank is a member
    active: bool  # this rank is a member, and there are other members


def membership(job: JobService, process_set: ProcessSet) -> Membership:
    """Return the ranks that take part in reductions over ``process_set``.

    A rank that is not a member may call this, too. Raises ValueError if ``process_set`` is not registered.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; pass it to init() or add_process_set() first")
    ranks = tuple(range(job.size) if process_set is global_process_set else process_set.ranks)
    return Membership(ranks, job.rank in ranks and len(ranks) > 1)


def find_process_set(ranks: Sequence[int]) -> ProcessSet | None:
    """Return the process set that is registered in the current job with the members ``ranks``, or None.

    This is for an object that was pickled in another job: the process set may have had another id in that job. Raises
    NotInitialized before ``init``.
    """
    found = ProcessSet(ranks)
    known = [set_id for set_id, members in process_sets().items() if list(members) == found.ranks]
    if not known:
        return None
    found.process_set_id = known[0]
    return found


def check_predivide(factor: float, op: ReduceOp = Average) -> None:
    """Raise ValueError if ``factor`` is not valid as ``gradient_predivide_factor``.

    Gradients are divided by ``factor`` before they are added. Then their sum is multiplied by ``factor`` and divided by
    the number of ranks. So ``factor`` must be greater than 0, and must be 1 if ``op`` is not Average.
    """
    if factor != 1.0 and op is not Average:
        raise ValueError(f"gradient_predivide_factor={factor} needs op=Average; it is {op.name}")
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor must be greater than 0, not {factor}")


def wait_for_all(
    handles: Iterable[Waitable], errors: tuple[type[Exception], ...] = (DdlInternalError,)
) -> tuple[list[Any], Exception | None]:
    """Wait for all handles. Return the results of the operations that succeeded, and the first error.

    The returned error is None if all operations succeeded. ``errors``: the types of the errors that an operation may
    raise. Any other exception, such as KeyboardInterrupt, ends the wait and is raised at once. After such an exception,
    the caller may call this function again.
    """
    failure: Exception | None = None
    results = []
    for handle in handles:
        try:
            results.append(handle.wait())
        except errors as error:
            failure = failure or error
    return results, failure
