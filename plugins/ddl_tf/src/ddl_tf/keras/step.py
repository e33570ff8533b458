"""Decides what becomes of a step's gradients before an optimizer has them: summed over passes, reduced, or left local."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ddl_tf.averages import divided
from ddl_tf.exchange import give_up
from ddl_tf.local import LocalVariables, identity
from ddl_tf.reducer import Reducer
from ddlcore.errors import DdlInternalError

__all__ = ["Step"]


class Step:
    """The gradients of one optimizer. Used by the thread that trains, or while that thread's graph is traced."""

    def __init__(
        self, optimizer: Any, reducer: Reducer, local: LocalVariables, passes: int, average_passes: bool
    ) -> None:
        self.optimizer = optimizer
        self.reducer = reducer
        self.local = local
        self.passes = passes
        self.reduced = False  # whether whoever calls the optimizer now has reduced the gradients already
        self._divisor = passes if average_passes else 1
        self._sums: dict[int, Any] = {}  # by variable; of the passes since the last step
        self._count: Any = None  # of those passes
        self._torn = False  # an exception has come between a reduction and its update
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self  # a copy of the optimizer is none that it knows

    def register_local_var(self, variable: Any) -> None:
        """From now on this variable's gradient is this rank's own: it is not reduced, but scaled where that was asked for.

        Called on every rank with the same variable, before the first step. Raises ValueError for what is no variable.
        """
        self.local.register(variable)

    def reduce(self, gradients: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
        """The gradients as the optimizer shall have them, in the same places; None stays None.

        Every member of the process set calls it with as many. Raises ValueError within a function that XLA
        compiles, and what the reducer raises.
        """
        return self.local.reduce(lambda _: self.reducer, list(gradients), list(variables))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Reduction and update together. Where the last ones were torn apart, the job ends: the peers have that update.

        That is, by an exception that is no ordinary one of an optimizer's, such as a signal's handler raises.
        """
        if not tf.executing_eagerly() or not self.reducer.active:
            yield
            return
        if self._torn:
            self._torn = False
            give_up(self.reducer.job)
        before = self.reducer.launches
        try:
            yield
        except (ValueError, TypeError, tf.errors.OpError, DdlInternalError):
            raise
        except BaseException:  # what is unfinished, the reducer goes on with
            self._torn = self.reducer.launches != before and not self.reducer.unfinished
            raise

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
            apply([None if total is None else divided(total.read_value(), self._divisor) for total in sums])
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)

        tf.cond(count >= self.passes, last, lambda: None)

    def _sums_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """One sum for each variable that has or had a gradient, made when it is met first; outside of any graph."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "backward_passes_per_step > 1 of a Keras optimizer needs eager execution or tf.function; "
                "in a v1 graph, use a tf.compat.v1.train optimizer"
            )
        with self._lock, tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            for gradient, variable in zip(gradients, variables, strict=True):
                key = identity(variable)
                if gradient is not None and key not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    self._sums[key] = tf.Variable(zeros, trainable=False)
        return [self._sums.get(identity(variable)) for variable in variables]
