"""Decides where a reduction on the host is scaled: on the way in, by the transport, on the way out.

float16 ends at 65504. Where the transport scales, it does so in float32, before it rounds. Where it does not, an average
in float16 is divided on the way in, as on queues of devices: who adds first and divides then makes an infinity of two
gradients of 40000. Dividing first costs the last bits of what is near float16's least value.
bfloat16 has float32's range, and integers would be truncated, so these are added first.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddlcore.contracts.transport import Capabilities
from ddlcore.messages import Spec
from ddlcore.types import DType, ReduceOp

__all__ = ["Scaling", "reduction", "scaling"]


@dataclass(frozen=True)
class Scaling:
    """``inside``: by what the transport scales before and after; None: not at all."""

    encode: float
    decode: float
    inside: tuple[float, float] | None = None


def reduction(spec: Spec, size: int) -> tuple[ReduceOp, float]:
    """The op that the transport does, and the scale on the way out."""
    if spec.op is ReduceOp.Average:
        return ReduceOp.Sum, spec.postscale / size
    return spec.op, spec.postscale


def scaling(capabilities: Capabilities | None, spec: Spec, wire: DType, size: int, joined: bool = False) -> Scaling:
    """Of what travels as ``wire``. ``capabilities``: of a transport that is given a Plan, None: it is given none.

    ``joined``: one of ``size`` ranks brings the identity, which a scale before would spoil.
    """
    _, after = reduction(spec, size)
    if capabilities is not None and capabilities.vectored and capabilities.scales:
        if wire is spec.dtype and not joined:
            return Scaling(1.0, 1.0, (spec.prescale, after))
        return Scaling(spec.prescale, 1.0, (1.0, after))
    if spec.op is ReduceOp.Average and wire is DType.F16:
        return Scaling(spec.prescale / size, spec.postscale)
    return Scaling(spec.prescale, after)
