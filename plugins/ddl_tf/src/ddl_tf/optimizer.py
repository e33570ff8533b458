"""Makes an optimizer of ``tf.compat.v1.train`` step on reduced gradients. The reduction itself is in reducer.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf

from ddl_tf.averages import divided
from ddl_tf.errors import translating
from ddl_tf.local import LocalVariables
from ddl_tf.reducer import Reducer, verbatim
from ddl_tf.reduction import Groups, Reduction
from ddlcore.api import ProcessSet, global_process_set, resolve_op
from ddlcore.errors import InvalidArgument
from ddlcore.types import Average


@translating
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    weight: Any = None,
) -> Any:
    """Return an optimizer that steps like ``optimizer``, but on gradients that are reduced over ``process_set``.

    ``optimizer`` is an optimizer of ``tf.compat.v1.train``, used in the graph of a session, in a ``tf.function`` or
    eagerly. A Keras optimizer is passed on to ``ddl_tf.keras.DistributedOptimizer``. Every rank must wrap its own
    optimizer, with the same arguments, after ``init()``. ``compute_gradients`` returns reduced gradients. So code that
    runs between ``compute_gradients`` and ``apply_gradients``, such as clipping, gets the same gradients on all ranks.

    * ``backward_passes_per_step`` n: each rank adds up its gradients over n passes (or averages them, with
      ``average_aggregated_gradients``). The gradients are reduced and applied in each n-th pass. In a session, run
      ``tf.compat.v1.local_variables_initializer()`` first, as MonitoredTrainingSession does.
    * the other arguments: see ``DistributedGradientTape``.

    Raises ValueError for invalid arguments, and NotInitialized before ``init()``.
    """
    common = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups if groups is not None else num_groups or None,
        "process_set": process_set,
    }
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap each optimizer once")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        keras = import_module("ddl_tf.keras")  # late, because it imports Keras, which scripts with sessions do not need
        return keras.DistributedOptimizer(
            optimizer,
            name=name,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            scale_local_gradients=scale_local_gradients,
            weight=weight,
            **common,
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be 1 or more, not {backward_passes_per_step}")
    if weight is not None:
        raise InvalidArgument(
            "weight= is for optimizers of Keras and for DistributedGradientTape; an optimizer of tf.compat.v1.train has none"
        )
    reduction = Reduction(**{**common, "op": resolve_op(op)})
    name = name or f"Distributed{type(optimizer).__name__}"
    reducer = Reducer(reduction, name, unique=True)
    local = LocalVariables(scale_local_gradients)
    divisor = backward_passes_per_step if average_aggregated_gradients else 1
    return _Distributed(optimizer, name, use_locking, reducer, local, backward_passes_per_step, divisor)


class _Distributed(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # TensorFlow has no types
    """The optimizer that ``DistributedOptimizer`` returns.

    The slots (TensorFlow's name for an optimizer's extra variables, such as momentum) and the variables of this
    optimizer are those of the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str,
        use_locking: bool,
        reducer: Reducer,
        local: LocalVariables,
        passes: int,
        divisor: int,
    ) -> None:
        super().__init__(use_locking, name)
        self._optimizer = optimizer
        self._reducer = reducer
        self._local = local
        self._passes = passes
        self._divisor = divisor
        self._sums: dict[int, Any] = {}  # by variable: sums over the passes since the last step
        self._count: Any = None  # the number of passes since the last step
        self._last: Any = None  # whether the latest gradients are to be applied

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of ``variable`` local to this rank.

        Call this method on every rank before the first step.
        """
        self._local.register(variable)

    @verbatim
    @translating
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients like the wrapped optimizer, and return pairs of a reduced gradient and its variable.

        With several passes per step, only the last pass reduces the gradients. Every member must call this method for
        the same variables.
        """
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        several = self._passes > 1
        reduced = self._accumulated(gradients, variables) if several else self._reduced(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    @verbatim
    @translating
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Apply gradients like the wrapped optimizer.

        With several passes per step, only the last pass applies the gradients.
        """
        pairs = list(grads_and_vars)
        if self._passes == 1:
            return self._optimizer.apply_gradients(pairs, *args, **kwargs)
        if self._last is None:
            raise ValueError("backward_passes_per_step > 1: call compute_gradients() before apply_gradients()")
        last, self._last = self._last, None

        def apply() -> Any:
            applied = self._optimizer.apply_gradients(pairs, *args, **kwargs)
            with tf.control_dependencies([] if applied is None else [applied]):
                cleared = [total.assign(tf.zeros_like(total), read_value=False) for total in self._sums.values()]
                cleared.append(self._count.assign(0, read_value=False))
            with tf.control_dependencies([op for op in cleared if op is not None]):
                return tf.constant(True)

        done = tf.cond(last, apply, lambda: tf.constant(False))
        return None if tf.executing_eagerly() else done.op

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._local.reduce(lambda _: self._reducer, gradients, variables)

    def _accumulated(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the sums of the gradients over the passes of this step.

        In the last pass, the sums are divided and reduced. Sparse gradients become dense.
        """
        self._make_sums(gradients, variables)
        added = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                total = self._sums[id(variable)]
                added.append(total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype), read_value=False))
        with tf.control_dependencies([op for op in added if op is not None]):
            count = self._count.assign_add(1)
            self._last = count >= self._passes
        with tf.control_dependencies([] if tf.executing_eagerly() else [count]):
            sums = [
                None if gradient is None else self._sums[id(variable)].read_value()
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
        there = [i for i, total in enumerate(sums) if total is not None]

        def reduced() -> list[Any]:
            means = [None if total is None else divided(total, self._divisor) for total in sums]
            results = self._reduced(means, variables)
            return [tf.ensure_shape(results[i], variables[i].shape) for i in there]

        given = tf.cond(self._last, reduced, lambda: [tf.identity(sums[i]) for i in there])
        given = given if isinstance(given, (list, tuple)) else [given]
        results: list[Any] = [None] * len(sums)
        for i, gradient in zip(there, given, strict=True):
            results[i] = gradient
        return results

    def _make_sums(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        kind = {"trainable": False, "collections": [tf.compat.v1.GraphKeys.LOCAL_VARIABLES], "use_resource": True}
        with tf.init_scope():
            if self._count is None:
                self._count = tf.compat.v1.Variable(0, dtype=tf.int64, name="ddl_passes", **kind)
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None and id(variable) not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype.base_dtype)
                    self._sums[id(variable)] = tf.compat.v1.Variable(zeros, name="ddl_sum", **kind)

    # --- passed on to the wrapped optimizer

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped optimizer, and return its result."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped optimizer, and return its result."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Call the same method of the wrapped optimizer, and return its result."""
        return self._optimizer.variables(*args, **kwargs)
