"""Decides what becomes of a step's gradients before an optimizer has them: summed over passes, reduced, or left local."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ddl_tf.reducer import Reducer
from ddlcore.api import ProcessSet, current_job, global_process_set

__all__ = ["Step"]

XLA = (
    "{who} communicates, and XLA compiles no communication: the job would hang or fail in the middle of a step. "
    "Use model.compile(..., jit_compile=False), or a tf.function without jit_compile=True around it"
)


class Step:
    """The gradients of one optimizer. Used by the thread that trains, or while that thread's graph is traced."""

    def __init__(self, optimizer: Any, reducer: Reducer, passes: int, average_passes: bool, scale_local: bool) -> None:
        self.optimizer = optimizer
        self.reducer = reducer
        self.passes = passes
        self.reduced = False  # whether whoever calls the optimizer now has reduced the gradients already
        self._average_passes = average_passes
        self._scale_local = scale_local
        self._local_variables: list[Any] = []
        self._local_layers: list[Any] = []
        self._sums: dict[int, Any] = {}  # by variable; of the passes since the last step
        self._count: Any = None  # of those passes
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self  # a copy of the optimizer is none that it knows

    # --- local variables

    def register_local_var(self, variable: Any) -> None:
        """From now on this variable's gradient is this rank's own: it is not reduced, but scaled where that was asked for.

        Called on every rank with the same variable, before the first step. Raises ValueError for what is no variable.
        """
        if not isinstance(variable, tf.Variable) and not hasattr(variable, "assign"):
            raise ValueError(f"register_local_var() takes a variable, not {type(variable).__name__}")
        self._local_variables.append(variable)

    def register_local_layers(self, layers: Iterable[Any]) -> None:
        """As if each of the layers' variables were registered, those that are yet to be built too."""
        for layer in layers:
            if not hasattr(layer, "trainable_weights"):
                raise ValueError(f"local_layers takes layers of Keras, not {type(layer).__name__}")
            self._local_layers.append(layer)

    def _local(self) -> set[int]:
        for layer in self._local_layers:
            if not layer.built:
                raise ValueError(
                    f"local layer {layer.name!r} was not built when the optimizer took its first step, so none of its "
                    "variables could stay local; build it, or leave it out of local_layers"
                )
        variables = [v for layer in self._local_layers for v in layer.trainable_weights]
        return {_identity(v) for v in (*variables, *self._local_variables)}

    # --- reduction

    @property
    def communicates(self) -> bool:
        """Whether a step of this rank has anybody to talk to."""
        ranks = _ranks(self.reducer.reduction.process_set)
        return len(ranks) > 1 and current_job().rank in ranks

    def reduce(self, gradients: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
        """The gradients as the optimizer shall have them, in the same places; None stays None.

        Every member of the process set calls it with as many. Raises ValueError within a function that XLA
        compiles, and what the reducer raises.
        """
        gradients, variables = list(gradients), list(variables)
        if not self.communicates:
            return gradients
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError(XLA.format(who=self.reducer.name))
        local = self._local()
        if not local:
            return self.reducer.reduce(gradients, variables)
        shared = [place for place, variable in enumerate(variables) if _identity(variable) not in local]
        reduced = self.reducer.reduce([gradients[i] for i in shared], [variables[i] for i in shared])
        results = [self._scaled(gradient) for gradient in gradients]
        for place, gradient in zip(shared, reduced, strict=True):
            results[place] = gradient
        return results

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None or not self._scale_local:
            return gradient
        factor = 1.0 / len(_ranks(self.reducer.reduction.process_set))
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        return gradient * factor

    # --- several passes a step

    def accumulate(
        self, gradients: Iterable[Any], variables: Iterable[Any], apply: Callable[[list[Any]], object]
    ) -> None:
        """Adds the gradients to those of the passes before; on the last pass ``apply`` gets the sums (or averages).

        The sums are this rank's own and in no checkpoint. Sparse gradients are summed densely.
        """
        gradients, variables = list(gradients), list(variables)
        sums = self._sums_of(gradients, variables)
        for total, gradient in zip(sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(tf.IndexedSlices(tf.cast(gradient.values, total.dtype), gradient.indices))
            elif gradient is not None:
                total.assign_add(tf.cast(gradient, total.dtype))
        count = self._count.assign_add(1)

        def last() -> None:
            divisor = self.passes if self._average_passes else 1
            apply([None if total is None else total.read_value() / divisor for total in sums])
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)

        tf.cond(count >= self.passes, last, lambda: None)

    def _sums_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """One sum for each variable that has a gradient, made when it is met first; outside of any graph."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "backward_passes_per_step > 1 of a Keras optimizer needs eager execution or tf.function; "
                "in a v1 graph, use a tf.compat.v1.train optimizer"
            )
        with self._lock, tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            for gradient, variable in zip(gradients, variables, strict=True):
                key = _identity(variable)
                if gradient is not None and key not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    self._sums[key] = tf.Variable(zeros, trainable=False)
        return [
            None if gradient is None else self._sums[_identity(variable)]
            for gradient, variable in zip(gradients, variables, strict=True)
        ]


def _identity(variable: Any) -> int:
    """What tells variables apart: TensorFlow's own, where Keras' is wrapped around it."""
    inner = getattr(variable, "value", None)
    return id(variable if inner is None or callable(inner) else inner)


def _ranks(process_set: ProcessSet) -> Sequence[int]:
    return range(current_job().size) if process_set is global_process_set else process_set.ranks
