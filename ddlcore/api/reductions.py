"""What the optimizers of all frameworks need to reduce gradients: the members, checks, and waiting for all handles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ddlcore.api.handles import Waitable
from ddlcore.api.world import ProcessSet, global_process_set, process_sets
from ddlcore.contracts.framework import JobService
from ddlcore.errors import DdlInternalError
from ddlcore.types import Average, ReduceOp

__all__ = ["Membership", "check_predivide", "find_process_set", "membership", "wait_for_all"]


class Membership(NamedTuple):
    """The ranks that take part in the reductions over a process set."""

    ranks: tuple[int, ...]  # the members, whether this rank is one or not
    active: bool  # this rank is a member, and there are others


def membership(job: JobService, process_set: ProcessSet) -> Membership:
    """Return which ranks take part in reductions over ``process_set``. A rank that is not a member may call this, too.

    Raises ValueError if the set is not registered.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; pass it to init() or add_process_set() first")
    ranks = tuple(range(job.size) if process_set is global_process_set else process_set.ranks)
    return Membership(ranks, job.rank in ranks and len(ranks) > 1)


def find_process_set(ranks: Sequence[int]) -> ProcessSet | None:
    """Return the registered process set of ``ranks``; None if there is none.

    This is for an object that was pickled in another job, where the set may have had another id. Raises NotInitialized
    before ``init``.
    """
    found = ProcessSet(ranks)
    known = [set_id for set_id, members in process_sets().items() if list(members) == found.ranks]
    if not known:
        return None
    found.process_set_id = known[0]
    return found


def check_predivide(factor: float, op: ReduceOp = Average) -> None:
    """Raise ValueError if ``factor`` is not valid as ``gradient_predivide_factor``.

    Gradients are divided by ``factor`` before they are added. Their sum is then divided by the number of ranks divided
    by ``factor``. So this needs Average, and a factor greater than 0.
    """
    if factor != 1.0 and op is not Average:
        raise ValueError(f"gradient_predivide_factor={factor} needs op=Average; it is {op.name}")
    if factor <= 0:
        raise ValueError(f"gradient_predivide_factor must be greater than 0, not {factor}")


def wait_for_all(
    handles: Iterable[Waitable], errors: tuple[type[Exception], ...] = (DdlInternalError,)
) -> tuple[list[Any], Exception | None]:
    """Wait for all handles. Return the results of those that succeeded, and the first error (None if all succeeded).

    ``errors``: the types of the errors that an operation may raise. Any other exception, such as an interrupt, is
    raised at once; the call may then be repeated.
    """
    failure: Exception | None = None
    results = []
    for handle in handles:
        try:
            results.append(handle.wait())
        except errors as error:
            failure = failure or error
    return results, failure
