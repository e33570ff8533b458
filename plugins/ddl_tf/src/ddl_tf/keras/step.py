"""Prepares gradients before an optimizer gets them: sums them over passes, and reduces them or leaves them local."""

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


class Step:
    """An object that processes the gradients of one optimizer before the optimizer applies them.

    Only the thread that trains, or the thread that traces the training graph, may use the object.
    """

    def __init__(
        self, optimizer: Any, reducer: Reducer, local: LocalVariables, passes: int, average_passes: bool
    ) -> None:
        self.optimizer = optimizer
        self.reducer = reducer
        self.local = local
        self.passes = passes
        self.reduced = False  # whether the caller of the optimizer has reduced the gradients already
        self.applying = False  # whether ``apply_gradients`` of the optimizer runs
        self.calls = 0  # of ``reduce`` and ``accumulate``
        self.divisor = passes if average_passes else 1  # of the sums over the passes
        self._sums: dict[int, Any] = {}  # by variable: sums over the passes since the last step
        self._count: Any = None  # the number of passes since the last step
        self._torn = False  # whether an exception has separated a reduction from its update
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self  # still with the original optimizer, so that for ``step_of`` the copy is not distributed

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of ``variable`` local to this rank: it is not reduced, but scaled if that was requested.

        Call this method on every rank with the same variable, before the first step. Raises ValueError if ``variable``
        is not a variable.
        """
        self.local.register(variable)

    def reduce(self, gradients: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
        """Return the gradients for the optimizer, reduced or left local, in the order of ``gradients``.

        A gradient that is None stays None. Every member of the process set must call this method with the same number
        of gradients. Raises ValueError within a function that XLA compiles, and the errors of ``Reducer.reduce``.
        """
        self.calls += 1
        return self.local.reduce(lambda _: self.reducer, list(gradients), list(variables))

    @contextmanager
    def with_reduced(self) -> Iterator[None]:
        """Return a context manager inside which the optimizer gets gradients that are reduced already."""
        before, self.reduced = self.reduced, True
        try:
            yield
        finally:
            self.reduced = before

    @contextmanager
    def in_apply(self) -> Iterator[None]:
        """Return a context manager inside which ``apply_gradients`` of the optimizer runs."""
        before, self.applying = self.applying, True
        try:
            yield
        finally:
            self.applying = before

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context manager inside which gradients are reduced and variables are updated with the results.

        If an exception occurs between the reduction and the update, the next step ends the job, because the other ranks
        have made an update that this rank has not made. An exception raised by a signal handler has this effect.
        Exceptions that an optimizer may ordinarily raise (ValueError, TypeError, errors of TensorFlow and of ddl) do
        not.
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
        except BaseException:
            # An unfinished reduction does not count: the next step's call of the reducer completes it.
            self._torn = self.reducer.launches != before and not self.reducer.unfinished
            raise

    # --- several passes a step

    def accumulate(
        self, gradients: Iterable[Any], variables: Iterable[Any], apply: Callable[[list[Any]], object]
    ) -> None:
        """Add ``gradients`` to those of the previous passes. In the last pass, call ``apply`` with the results.

        The results are the sums over the passes, or the averages. The sums belong to this rank and are not saved in
        checkpoints. Sparse gradients are added to dense sums.
        """
        self.calls += 1
        gradients, variables = list(gradients), list(variables)
        sums = self._sums_of(gradients, variables)
        for total, gradient in zip(sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(tf.IndexedSlices(tf.cast(gradient.values, total.dtype), gradient.indices))
            elif gradient is not None:
                total.assign_add(tf.cast(gradient, total.dtype))
        count = self._count.assign_add(1)

        def last() -> None:
            apply([None if total is None else divided(total.read_value(), self.divisor) for total in sums])
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            self._count.assign(0)

        tf.cond(count >= self.passes, last, lambda: None)

    def forget_passes(self) -> None:
        """Begin the current step again, by setting the sums over its passes to zero."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        if self._count is not None:
            self._count.assign(0)

    def _sums_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return, for each of ``variables``, the variable that contains the sum of its gradients.

        The item is None if the variable never had a gradient. New variables for sums are created outside of any graph.
        """
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
