"""The arguments of one collective that has a gradient.

The forward pass uses these arguments. The backward pass derives the arguments of its own collective from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from ddlcore.api.process_set import ProcessSet
from ddlcore.contracts.framework import JobService
from ddlcore.types import Average, ReduceOp, Sum

__all__ = ["CollectiveCall"]

C = TypeVar("C", bound="CollectiveCall")


@dataclass(frozen=True)
class CollectiveCall:
    """The arguments that the forward and the backward pass of one collective share. A subclass may add arguments.

    ``job`` is kept because the backward pass may run on a thread of the framework, which has no current job. The
    backward pass runs a collective, too, so all members must run it. In the following list, g is the gradient of a
    rank's output. The gradient of the rank's input is:

    * for an allreduce: the result of an allreduce of g with the same op and factors;
    * for an allgather: the rows of this rank's own input, taken from the result of an allreduce (Average) of g;
    * for a broadcast: on the root, the result of an allreduce (Average) of g; on all other ranks, zero;
    * for an alltoall: the result of an alltoall of g that sends each row back to the rank that has sent it;
    * for a reducescatter: the result of an allgather of g, multiplied by ``gathered_scale()``.
    """

    job: JobService
    process_set: ProcessSet
    name: str | None = None
    op: ReduceOp = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: str = "none"
    part_of: str = field(default="", kw_only=True)  # of an allreduce, see ``Operations.persistent_allreduce``

    advice: ClassVar[str] = "use Average or Sum"  # what to do about an op that has no gradient

    def more(self: C, what: str, **changes: Any) -> C:
        """Return the arguments of another collective that belongs to this one, such as the one for the gradient.

        The name of the other collective is this call's name followed by "." and ``what``. If this call has no name, the
        other collective has no name either, because calls without a name are paired by their order. ``changes``:
        arguments that differ from those of this call.
        """
        return replace(self, name=None if self.name is None else f"{self.name}.{what}", **changes)

    def backward(self: C) -> C:
        """Return the arguments of the collective that computes the gradient. Its name is this name plus ".grad"."""
        return self.more("grad")

    def members(self) -> tuple[int, ...]:
        """Return the members of the process set in rising order. Raises ValueError if this rank is not a member."""
        return self.process_set.resolve(self.job)[1]

    def set_rank(self) -> int:
        """Return the position of this rank among the members of the process set."""
        return self.members().index(self.job.rank)

    def plain(self) -> dict[str, Any]:
        """Return the keyword arguments for a collective that moves data without reducing it, such as an allgather."""
        return {"name": self.name, "process_set": self.process_set, "job": self.job}

    def reduction(self) -> dict[str, Any]:
        """Return the keyword arguments for a collective that reduces tensors, such as an allreduce."""
        return {
            **self.plain(),
            "op": self.op,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
            "compression": self.compression,
            **({"part_of": self.part_of} if self.part_of else {}),
        }

    def gathered_scale(self) -> float:
        """Return the factor by which the gradient of a reducescatter is multiplied.

        This is the product of ``prescale_factor``, ``postscale_factor`` and, if ``op`` is Sum, the number of members.
        """
        factor = self.prescale_factor * self.postscale_factor
        return factor * len(self.members()) if self.op == Sum else factor

    def check_differentiable(self, verb: str) -> None:
        """Raise NotImplementedError if ``op`` has no gradient. Only Average and Sum have a gradient.

        ``verb``: the name of the collective, for the error message.
        """
        if self.op not in (Average, Sum):
            raise NotImplementedError(f"{verb} with op={self.op.name} has no gradient; {self.advice}")
