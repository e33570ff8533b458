"""Binds one optimizer to one job: gives the names of its gradients in that job, and the allreduce functions to use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ddl_torch.autograd import OPERATIONS
from ddl_torch.slots import Reduction
from ddlcore.api import Waitable, current_job, membership
from ddlcore.contracts import JobService, PersistentRequest
from ddlcore.types import Average, ReduceOp, Sum


@dataclass(frozen=True)
class Binding:
    """The names of gradients and the functions that one optimizer uses in one job.

    ``active`` says whether this rank takes part in the reduction.
    """

    job: JobService
    active: bool  # this rank is a member of the process set, and the set has other members, or passes have weights
    members: int  # how many ranks the process set has
    op: ReduceOp  # how values are reduced; for an average with weights, the ranks divide the sum themselves
    prefix: str  # what the names of the gradients begin with in the job
    repeatable: bool  # reducing a result again leaves it unchanged
    allreduce: Callable[..., Waitable]
    grouped_allreduce: Callable[..., Waitable]
    persistent_allreduce: Callable[..., PersistentRequest]


def bind(reduction: Reduction) -> Binding:
    """Return the names and functions with which an optimizer uses the current job.

    ``reduction`` has the optimizer's options for the reduction of gradients. Raises NotInitialized if there is no
    current job, and ValueError if the process set is not registered.
    """
    job = current_job()
    process_set = reduction.process_set
    ranks, active = membership(job, process_set)
    active = active or (reduction.weighted and job.rank in ranks)  # also alone: its passes may have different weights
    op = Sum if reduction.weighted else reduction.op
    # Two models, as those of a GAN, may have parameters of the same names, and both gradients may be in flight at once.
    ordinal = job.next_ordinal(f"optimizer.{process_set.process_set_id}") if active else 0
    compressor = job.compressor(reduction.compression)
    allreduce = partial(
        OPERATIONS.allreduce_async,
        op=op,
        prescale_factor=reduction.prescale_factor,
        postscale_factor=reduction.postscale_factor,
        compression=reduction.compression,
        process_set=process_set,
        job=job,
        stage_on_host=reduction.stage_dense_on_host,
    )
    return Binding(
        job,
        active,
        len(ranks),
        op,
        "gradient." if ordinal == 0 else f"gradient.{ordinal}.",
        # The average of equal values is the same value, so averaging (result + new gradients) again gives result + the
        # average of the new gradients. A sum would be multiplied by the number of ranks each time.
        reduction.op is Average
        and reduction.user_compressor is None
        and (compressor.casts or reduction.compression == "none"),
        allreduce,
        partial(OPERATIONS.grouped_allreduce_async, **allreduce.keywords),
        partial(OPERATIONS.persistent_allreduce, **allreduce.keywords),
    )
