"""Decides where a reduction on the host is scaled: before the transport, by the transport, or after it.

If the transport scales, it does so in float32, before it rounds. If it does not scale, the element type decides:

An average in float16 is divided before the transport, as in reductions on devices. The largest float16 is 65504, so
adding two gradients of 40000 first and dividing later would give infinity. Dividing first loses the last bits of values
near the smallest float16.

An average in bfloat16 or of integers is divided after the transport: bfloat16 has the range of float32, and integers
would be truncated before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlcore.contracts.transport import Capabilities
from ddlcore.messages.spec import Spec
from ddlcore.messages.to_rank import Bucket
from ddlcore.runtime.process_sets import Communicator
from ddlcore.types import DType, ReduceOp


@dataclass(frozen=True)
class Scaling:
    """The factors of a reduction.

    Values are multiplied by ``encode`` before the transport and by ``decode`` after the transport. ``inside`` is a pair
    of factors that the transport applies: one before the reduction and one after it. ``inside`` is None if the
    transport applies no factors.
    """

    encode: float
    decode: float
    inside: tuple[float, float] | None = None


def divisor_of(communicator: Communicator, bucket: Bucket) -> int:
    """Return by how many ranks an average of the negotiated ``bucket`` divides: fewer than all while some have joined."""
    return bucket.contributors or len(communicator.ranks)


def reduction(spec: Spec, size: int) -> tuple[ReduceOp, float]:
    """Return the operation that the transport must do for ``spec``, and the factor that is applied to its result.

    An average over ``size`` ranks is a sum that is divided by ``size``.
    """
    if spec.op is ReduceOp.Average:
        return ReduceOp.Sum, spec.postscale / size
    return spec.op, spec.postscale


def scaling(capabilities: Capabilities | None, spec: Spec, wire: DType, size: int, joined: bool = False) -> Scaling:
    """Return the factors for the reduction that ``spec`` describes, over ``size`` ranks.

    ``wire`` is the type in which the values are sent. ``capabilities`` are those of the transport if the transport runs
    the reduction by a Plan; otherwise None. ``joined`` says that some of the ranks may have joined. A rank that has
    joined contributes the identity element of the reduction. The transport must not multiply this element by the factor
    before the reduction.
    """
    _, after = reduction(spec, size)
    if capabilities is not None and capabilities.vectored and capabilities.scales:
        if wire is spec.dtype and not joined:
            return Scaling(1.0, 1.0, (spec.prescale, after))
        return Scaling(spec.prescale, 1.0, (1.0, after))
    if spec.op is ReduceOp.Average and wire is DType.F16:
        return Scaling(spec.prescale / size, spec.postscale)
    return Scaling(spec.prescale, after)
