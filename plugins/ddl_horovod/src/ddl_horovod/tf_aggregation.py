"""Adds up the gradients of several backward passes on each rank, for optimizers that a user makes of Horovod's helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ddl_tf import present
from ddl_tf.averages import divided
from ddl_tf.local import LocalVariables

from ddl_horovod.tf_steps import local_variable, only_if
from ddlcore.api import ProcessSet
from ddlcore.errors import InvalidArgument

Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]  # gradients and their variables; reduced gradients


class Aggregation:
    """The sums of one optimizer's gradients over ``passes`` backward passes, and when they are reduced and applied.

    ``reduce`` is a function that reduces gradients over all ranks. ``averages``: the sums are divided by ``passes``. ``scales``:
    the gradients of local variables are divided by the number of ranks of ``process_set``. It works eagerly, in a
    tf.function and in the graph of a session, whose local variables must be initialized.
    """

    def __init__(
        self, passes: int, reduce: Reduce, sparse_as_dense: bool, averages: bool, process_set: ProcessSet, scales: bool
    ) -> None:
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        self.allreduce_grads = reduce
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = averages
        self.process_set = process_set
        self.scale_local_gradients = scales
        self.counter: Any = None  # passes since the last reduction
        self.locally_aggregated_grads: dict[int, Any] = {}  # the sums so far, by position; see ``_key``
        self._own = LocalVariables(scale=False)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of ``var`` local to this rank."""
        self._own.register(var)

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add ``grads``, those of ``vars``, to the sums. Return the reduced sums in each pass that is due, otherwise the sums.

        A None stays None. Raises InvalidArgument for a sparse gradient without ``sparse_as_dense``.
        """
        given = [self._dense(one) for one in grads]
        there = [at for at, one in enumerate(given) if one is not None]
        keys = {at: self._key(at, vars[at]) for at in there}
        self._make(given, keys)
        sums = [self.locally_aggregated_grads[keys[at]] for at in there]
        every = list(self.locally_aggregated_grads.values())  # also those that have no gradient in this pass
        first = tf.equal(tf.convert_to_tensor(self.counter.read_value()), 0)
        with tf.control_dependencies(only_if(first, lambda: [one.assign(tf.zeros_like(one)) for one in every])):
            added = [to.assign_add(given[at], read_value=True) for to, at in zip(sums, there)]
        with tf.control_dependencies([tf.convert_to_tensor(one) for one in added]):
            count = tf.convert_to_tensor(self.counter.assign_add(1, read_value=True))
        with tf.control_dependencies([count]):
            totals = [tf.convert_to_tensor(one.read_value()) for one in sums]
        # A pass that was due may have had no gradient at all; then the next one is.
        due = tf.greater_equal(count, self.backward_passes_per_step)
        results = (
            tf.cond(due, lambda: self._reduced(totals, [vars[at] for at in there]), lambda: totals) if there else []
        )
        for at, one in zip(there, results):
            given[at] = one
        return given

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``apply_grads_closure`` if the sums have just been reduced. Otherwise only count a step.

        ``args[0]`` has pairs of gradients and variables; the call waits for the gradients. A step is counted by
        ``optimizer.iterations`` and by the argument ``global_step``, as far as they are there.
        """
        gradients = [gradient for gradient, _ in args[0] if gradient is not None] if args else []

        def skipped() -> list[Any]:
            counters = (getattr(optimizer, "iterations", None), kwargs.get("global_step"))
            return [tf.convert_to_tensor(one.assign_add(1)) for one in counters if one is not None]

        with tf.control_dependencies(gradients):
            applies = tf.equal(tf.convert_to_tensor(self.counter.read_value()), 0)
            if tf.executing_eagerly():
                return apply_grads_closure() if applies else skipped()[:0]
            done = only_if(applies, lambda: [one for one in [apply_grads_closure()] if one is not None])
            return tf.group(*done, *only_if(tf.logical_not(applies), skipped))

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise InvalidArgument("IndexedSlices need sparse_as_dense=True when `backward_passes_per_step` > 1")
        return tf.convert_to_tensor(gradient)

    def _key(self, at: int, variable: Any) -> int:
        """Return the key of the sum to which the gradient at position ``at``, that of ``variable``, is added."""
        return at

    def _make(self, gradients: Sequence[Any], keys: Mapping[int, int]) -> None:
        with tf.init_scope():  # outside of a tf.function
            if self.counter is None:
                self.counter = local_variable(0, "passes")
            for at, key in keys.items():
                if key not in self.locally_aggregated_grads:
                    zeros = tf.zeros(gradients[at].shape, gradients[at].dtype)
                    self.locally_aggregated_grads[key] = local_variable(zeros, f"sum_{at}")

    def _reduced(self, totals: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        shared = [at for at, one in enumerate(variables) if not self._own.holds(one)]
        results = list(totals)
        if self.scale_local_gradients:
            own = set(range(len(totals))) - set(shared)
            results = [
                divided(one, present.count_of_members(self.process_set, one)) if at in own else one
                for at, one in enumerate(totals)
            ]
        if shared:
            reduced = self.allreduce_grads([totals[at] for at in shared], [variables[at] for at in shared])
            for at, one in zip(shared, reduced):
                results[at] = one
        if self.average_aggregated_gradients:
            results = [one / self.backward_passes_per_step for one in results]
        with tf.control_dependencies(results):
            reset = tf.convert_to_tensor(self.counter.assign(0, read_value=True))
        with tf.control_dependencies([reset]):
            return [tf.identity(one) for one in results]
