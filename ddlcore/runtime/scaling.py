"""Decides where a reduction on the host is scaled: before the transport, by the transport, or after it.

The largest float16 is 65504. If the transport scales, it does so in float32, before it rounds. If it does not, an
average in float16 is divided before the transport, as on the queues of devices: adding two gradients of 40000 first and
dividing later would give infinity. Dividing first costs the last bits of values near the smallest float16. An average
in bfloat16 or of integers is divided after the transport: bfloat16 has the range of float32, and integers would be
truncated before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlcore.contracts.transport import Capabilities
from ddlcore.messages import Spec
from ddlcore.types import DType, ReduceOp


@dataclass(frozen=True)
class Scaling:
    """The factors of a reduction: ``encode`` before the transport, ``decode`` after it, ``inside`` within it.

    ``inside`` is the transport's factor before the reduction and its factor after it; None if it applies none.
    """

    encode: float
    decode: float
    inside: tuple[float, float] | None = None


def reduction(spec: Spec, size: int) -> tuple[ReduceOp, float]:
    """Return the operation that the transport does for ``spec``, and the factor to apply after it.

    An average over ``size`` ranks is a sum that is divided by ``size``.
    """
    if spec.op is ReduceOp.Average:
        return ReduceOp.Sum, spec.postscale / size
    return spec.op, spec.postscale


def scaling(capabilities: Capabilities | None, spec: Spec, wire: DType, size: int, joined: bool = False) -> Scaling:
    """Return the factors of the reduction ``spec`` over ``size`` ranks, whose values are sent as ``wire``.

    ``capabilities`` are those of a transport that can be given a Plan, otherwise None. ``joined`` says that some of the
    ranks may have joined. Such a rank contributes the identity element, which the transport must not multiply by the
    factor before the reduction.
    """
    _, after = reduction(spec, size)
    if capabilities is not None and capabilities.vectored and capabilities.scales:
        if wire is spec.dtype and not joined:
            return Scaling(1.0, 1.0, (spec.prescale, after))
        return Scaling(spec.prescale, 1.0, (1.0, after))
    if spec.op is ReduceOp.Average and wire is DType.F16:
        return Scaling(spec.prescale / size, spec.postscale)
    return Scaling(spec.prescale, after)
