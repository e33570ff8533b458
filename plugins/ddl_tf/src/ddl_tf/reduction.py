"""Holds the options with which a tape or an optimizer reduces its gradients, and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddl_tf.devices import check_device
from ddl_tf.weights import check_given
from ddlcore.api import (
    ProcessSet,
    check_predivide,
    check_weighted,
    global_process_set,
    gradient_compression,
    resolve_op,
)
from ddlcore.types import Average, ReduceOp, Sum

Groups = int | Sequence[Sequence[Any]] | None


@dataclass(frozen=True)
class Reduction:
    """The options with which every gradient is reduced. Raises ValueError for invalid options.

    * ``gradient_predivide_factor`` f: gradients are divided by f before the sum and by size / f after it.
    * ``compression``: a class of ``Compression``, the name of a compressor, or a class with the methods ``compress``
      and ``decompress``. None: the setting ``compression`` decides.
    * ``groups``: the number of groups of gradients that are sent together, or a list of lists of variables.
    * ``device_dense``, ``device_sparse``: where dense and sparse gradients are reduced. '' means the device where the
      gradients are; the name of the host, such as '/cpu:0', means the host.
    """

    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    groups: Groups = None
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        op, factor = resolve_op(self.op), self.gradient_predivide_factor
        object.__setattr__(self, "op", op)
        check_predivide(factor, op)
        gradient_compression(self.compression)
        check_device(self.device_dense, "device_dense")
        check_device(self.device_sparse, "device_sparse")
        if isinstance(self.groups, int) and not isinstance(self.groups, bool):
            if self.groups < 0:
                raise ValueError(f"groups must be 0 or more, not {self.groups}")
        elif self.groups is not None and not isinstance(self.groups, (list, tuple)):
            raise ValueError("groups should be a positive integer or a list of lists of tf.Variable")


def summing(reduction: Reduction, weight: Any) -> Reduction:
    """Return the reduction for gradients that have a ``weight``: a sum of those that each rank has multiplied.

    Raises InvalidArgument if it is no plain average, or if ``weight`` cannot be a weight. Without a weight (None),
    returns ``reduction``.
    """
    if weight is None:
        return reduction
    factor = reduction.gradient_predivide_factor
    check_weighted(reduction.op, 1.0 / factor, factor)
    check_given(weight, reduction.process_set)
    return replace(reduction, op=Sum)
