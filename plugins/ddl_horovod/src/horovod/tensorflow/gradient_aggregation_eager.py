"""Adds up the gradients of several backward passes, eagerly or in a tf.function, for an optimizer of one's own."""

from __future__ import annotations

from ddl_horovod.tf_aggregation import Aggregation, Reduce

from ddlcore.api import ProcessSet, global_process_set
from horovod.tensorflow.mpi_ops import size_op

__all__ = ["LocalGradientAggregationHelperEager", "global_process_set", "size_op"]


class LocalGradientAggregationHelperEager(Aggregation):
    """The sums of gradients for one optimizer, which are reduced by ``allreduce_func(gradients, variables)``.

    The other arguments and the methods: see ``Aggregation``.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        more = (sparse_as_dense, average_aggregated_gradients, process_set, scale_local_gradients)
        super().__init__(backward_passes_per_step, allreduce_func, *more)
