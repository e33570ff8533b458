"""The arguments of one collective that has a gradient: forward uses them, and backward derives its own from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from ddlcore.api.world import ProcessSet
from ddlcore.contracts.framework import JobService
from ddlcore.types import Average, ReduceOp, Sum

__all__ = ["CollectiveCall"]

C = TypeVar("C", bound="CollectiveCall")


@dataclass(frozen=True)
class CollectiveCall:
    """The arguments that forward and backward of one collective share. A framework may add more in a subclass.

    ``job`` is kept because backward may run on a thread of the framework, which has no current job. Backward is a
    collective too, so all members must run it. With g the gradient of a rank's output, the gradient of its input is:

    * allreduce: an allreduce of g with the same op and scales;
    * allgather: an allreduce (Average) of g, of which a rank takes the rows that it contributed;
    * broadcast: an allreduce (Average) of g on the root, zero on all other ranks;
    * alltoall: an alltoall of g that sends each row back to the rank from which it came;
    * reducescatter: an allgather of g, times ``gathered_scale``.
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
        """Return the arguments of a further collective that belongs to this one, with a name of its own.

        Its name is this call's name with ``what`` added. If this call has no name, the further one has none either:
        calls without a name are paired by their order. ``changes``: arguments that differ from those of this call.
        """
        return replace(self, name=None if self.name is None else f"{self.name}.{what}", **changes)

    def backward(self: C) -> C:
        """Return the arguments of the collective that computes the gradient; it has a name of its own."""
        return self.more("grad")

    def members(self) -> tuple[int, ...]:
        """Return the members of the process set, in its order. Raises ValueError if this rank is not a member."""
        return self.process_set.resolve(self.job)[1]

    def set_rank(self) -> int:
        """Return this rank's rank within the process set."""
        return self.members().index(self.job.rank)

    def plain(self) -> dict[str, Any]:
        """Return the keyword arguments for a collective that only moves data."""
        return {"name": self.name, "process_set": self.process_set, "job": self.job}

    def reduction(self) -> dict[str, Any]:
        """Return the keyword arguments for a collective that reduces."""
        return {
            **self.plain(),
            "op": self.op,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
            "compression": self.compression,
            **({"part_of": self.part_of} if self.part_of else {}),
        }

    def gathered_scale(self) -> float:
        """Return the factor for the gradient of a reducescatter: both scales and, for Sum, the number of members."""
        factor = self.prescale_factor * self.postscale_factor
        return factor * len(self.members()) if self.op == Sum else factor

    def check_differentiable(self, verb: str) -> None:
        """Raise NotImplementedError if ``op`` has no gradient: only Average and Sum have one."""
        if self.op not in (Average, Sum):
            raise NotImplementedError(f"{verb} with op={self.op.name} has no gradient; {self.advice}")
