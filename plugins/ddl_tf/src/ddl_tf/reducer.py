"""Brings a list of gradients to the ranks' reduction of them, eagerly and in graphs; knows no optimizer and no tape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from ddlcore.api import ProcessSet, arrays, current_job, global_process_set, wire_compression
from ddlcore.types import Average, ReduceOp

__all__ = ["Reducer", "Reduction"]


@dataclass(frozen=True)
class Reduction:
    """How every gradient is reduced."""

    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = None  # a class of ``Compression``, a compressor's name, a class of the user's; None: none
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = field(default=global_process_set)


class Reducer:
    """The gradients of one optimizer or tape, which are known by ``name`` on the wire."""

    def __init__(self, reduction: Reduction, name: str) -> None:
        self.reduction = reduction
        self.name = name
        wire_compression("none" if reduction.compression is None else reduction.compression)
        self._job = current_job()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients, in the same places; None stays None. Every member calls it with as many."""
        gradients = list(gradients)
        if len(gradients) != len(variables):
            raise ValueError(f"{len(gradients)} gradients are given for {len(variables)} variables; give one for each")
        dense = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        places = [i for i, gradient in enumerate(dense) if gradient is not None]
        if not places:
            return gradients
        taken = [tf.convert_to_tensor(dense[i]) for i in places]
        if tf.executing_eagerly():
            reduced = [tf.convert_to_tensor(a) for a in self._arrays(*(g.numpy() for g in taken))]
        else:
            reduced = tf.numpy_function(self._arrays, taken, [g.dtype for g in taken])
            for tensor, gradient in zip(reduced, taken, strict=True):
                tensor.set_shape(gradient.shape)
        results: list[Any] = [None] * len(dense)
        for place, tensor in zip(places, reduced, strict=True):
            results[place] = tensor
        return results

    def _arrays(self, *given: Any) -> list[Any]:
        factor = self.reduction.gradient_predivide_factor
        handles = [
            arrays.allreduce_async(
                np.require(array, requirements="C"),
                f"gradient.{self.name}.{i}",
                self.reduction.op,
                1.0 / factor,
                factor,
                self.reduction.process_set,
            )
            for i, array in enumerate(given)
        ]
        return [handle.wait() for handle in handles]
