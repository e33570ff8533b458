"""Says what is reduced for an average with weights, and how the results follow; knows no framework's arithmetic.

Tensors of 16 bits are multiplied by a plain weight as float32, and travel so: a count of tokens times a value may be
larger than the largest float16. The results have the types of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ddlcore.api.operations import Operations
from ddlcore.api.process_set import ProcessSet
from ddlcore.api.weights import Share, Weight, average_by, check_weighted, checked_weight, reciprocal_of
from ddlcore.api.world import current_job
from ddlcore.contracts.adapter import Adapter
from ddlcore.errors import InvalidArgument
from ddlcore.runtime.handle import Handle
from ddlcore.types import ReduceOp, Sum

__all__ = ["Arithmetic", "Weighed", "weigh", "weighted_average_async"]


class Arithmetic(Protocol):
    """What an average with weights computes with the tensors of one framework."""

    def multiplied(self, tensor: Any, factor: float, wide: bool) -> Any:
        """Return ``factor * tensor`` as a new tensor, of float32 if ``wide``; 0 for a factor of 0, also for NaN."""

    def number(self, value: float, like: Any) -> Any:
        """Return a tensor with the one element ``value``, on the device of ``like``, of at least 32 bits."""

    def value(self, number: Any) -> float:
        """Return the element of what ``number`` has returned."""

    def result(self, total: Any, factor: float, like: Any) -> Any:
        """Return ``factor * total`` in the type of ``like``."""


class Weighed(NamedTuple):
    """What a rank contributes to an average with weights.

    The tensors ``sent`` are summed over the ranks as one group, with ``part_of`` in their specs. ``results(sums)`` is then
    the list of averages; it raises InvalidArgument, on all ranks, if all weights are 0.
    """

    sent: list[Any]
    part_of: str
    results: Callable[[Sequence[Any]], list[Any]]


def weigh(
    tensors: Sequence[Any], weight: Weight, compression: str, adapter: Adapter, arithmetic: Arithmetic
) -> Weighed:
    """Return what this rank contributes to the average of ``tensors`` with its ``weight``.

    Raises InvalidArgument for tensors that are not of floating point, and for a plain weight together with
    ``compression``.
    """
    buffers = [adapter.buffer(tensor, elementwise=True) for tensor in tensors]
    wrong = [buffer.label for buffer in buffers if not buffer.dtype.is_float]
    if wrong:
        raise InvalidArgument(f"weight= needs tensors of floating point, not {wrong[0]}; cast the tensor first")
    if isinstance(weight, Share):
        return Weighed(
            [arithmetic.multiplied(tensor, weight.factor, False) for tensor in tensors], average_by(True), list
        )
    if compression != "none":
        raise InvalidArgument(
            f"weight={weight:g} cannot be combined with compression={compression!r}, which would compress the sum of the "
            "weights; pass a Share, or no compression"
        )
    wide = [buffer.dtype.itemsize < 4 for buffer in buffers]
    sent = [arithmetic.multiplied(tensor, weight, more) for tensor, more in zip(tensors, wide)]

    def divided(sums: Sequence[Any]) -> list[Any]:
        factor = reciprocal_of(arithmetic.value(sums[-1]), "tensor")
        return [arithmetic.result(total, factor, tensor) for total, tensor in zip(sums[:-1], tensors)]

    return Weighed([*sent, arithmetic.number(weight, tensors[0])], average_by(False), divided)


def weighted_average_async(
    operations: Operations,
    arithmetic: Arithmetic,
    place: Callable[[Sequence[Any], Sequence[Any]], object],
    tensors: Sequence[Any],
    outputs: Sequence[Any] | None,
    single: bool,
    weight: Any,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    compression: str = "none",
) -> Handle:
    """Start the average of ``tensors`` with this rank's ``weight``, and return its handle.

    The result of the handle is a list of tensors, or if ``single``, the only tensor: new ones, or ``outputs``, into
    which its ``wait`` writes the averages by ``place(outputs, averages)``. Raises InvalidArgument for what has no average.
    """
    check_weighted(op, prescale_factor, postscale_factor)
    job = current_job()
    given = checked_weight(weight, len(process_set.resolve(job)[1]))
    for output in outputs or ():
        operations.adapter.require_writable(output)
    mine = weigh(tensors, given, compression, operations.adapter, arithmetic)

    def placed(sums: Sequence[Any]) -> Any:
        results = mine.results(sums)
        if outputs is not None:
            place(outputs, results)
            results = [*outputs]
        return results[0] if single else results

    how: Any = {"name": name, "process_set": process_set, "compression": compression, "job": job}
    return operations.grouped_allreduce_async(mine.sent, op=Sum, then=placed, part_of=mine.part_of, **how)
