"""Adds up the gradients of several backward passes, in the graph of a session, for an optimizer of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ddl_horovod.tf_aggregation import Aggregation, Reduce

from ddlcore.api import ProcessSet, global_process_set
from horovod.tensorflow.mpi_ops import size_op

__all__ = [
    "LocalGradientAggregationHelper",
    "apply_op_to_not_none_tensors",
    "get_not_none_from_list",
    "global_process_set",
    "size_op",
]


def apply_op_to_not_none_tensors(tensor_op: Callable[..., Any], tensors: Sequence[Any], *args: Any) -> list[Any]:
    """Return ``tensor_op(tensor, *args)`` for each of ``tensors``, and None for each None."""
    return [None if tensor is None else tensor_op(tensor, *args) for tensor in tensors]


def get_not_none_from_list(tensor_list: Sequence[Any]) -> list[Any]:
    """Return ``tensor_list`` without its Nones."""
    return [tensor for tensor in tensor_list if tensor is not None]


class LocalGradientAggregationHelper(Aggregation):
    """The sums of gradients for one optimizer, which are reduced by ``allreduce_func(gradients, variables)``.

    ``optimizer_type`` is one of the two constants below. With the first one, the session of Keras initializes the sums.
    ``rank`` and ``name`` are not used. The other arguments and the methods: see ``Aggregation``.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        more = (sparse_as_dense, average_aggregated_gradients, process_set, scale_local_gradients)
        super().__init__(backward_passes_per_step, allreduce_func, *more)
        self.optimizer_type = optimizer_type

    def _make(self, gradients: Sequence[Any], keys: Mapping[int, int]) -> None:
        super()._make(gradients, keys)
        if self.optimizer_type == self._OPTIMIZER_TYPE_KERAS and not tf.compat.v1.executing_eagerly_outside_functions():
            variables = [self.counter, *self.locally_aggregated_grads.values()]
            session = tf.compat.v1.keras.backend.get_session(op_input_list=())
            session.run(tf.compat.v1.variables_initializer(variables))
