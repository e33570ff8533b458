"""Makes ``compute_gradients`` of an optimizer of tf_keras return reduced gradients, as Horovod's optimizers do.

An optimizer of ddl_tf reduces in ``apply_gradients``. A script for Horovod may change the gradients in between, for example
clip them, and then its results depend on where they are reduced. Optimizers of Keras 3, of which Horovod knows nothing, have
no ``compute_gradients``.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import tensorflow as tf
from ddl_tf import keras
from ddl_tf.compression import Compression
from ddl_tf.keras.families import KerasFamily, family_of
from ddl_tf.keras.interception import meet
from ddl_tf.keras.optimizer import reduced_pairs
from ddl_tf.keras.seams import step_of
from ddl_tf.keras.step import Step
from ddl_tf.local import identity

from ddl_horovod.tf_aggregation import Aggregation
from ddlcore.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])
Pairs = list[tuple[Any, Any]]  # gradients with their variables
Variables = dict[int, Any]  # by identity


class ComputedGradients:
    """Reduces the gradients that one optimizer computes, and keeps ``apply_gradients`` from reducing them again.

    With an ``aggregation``, the gradients of several passes are added up before they are reduced, and each pass counts as a
    step of the optimizer.
    """

    def __init__(self, optimizer: Any, step: Step, aggregation: Aggregation | None) -> None:
        self._optimizer = optimizer
        self._step = step
        self._aggregation = aggregation
        # The variables whose gradients have been computed and not applied since, by identity: eagerly, and in each graph.
        self._waiting: Variables = {}
        self._waiting_in: weakref.WeakKeyDictionary[Any, Variables] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputedGradients:
        return self  # a copy of the optimizer is not distributed

    def compute(self, bare: Callable[..., Any], *args: Any, **kwargs: Any) -> Pairs:
        """Return the gradients that ``bare`` computes with these arguments, reduced, with their variables."""
        pairs = list(bare(*args, **kwargs))
        if self._aggregation is None:
            pairs = reduced_pairs(self._step, pairs)
        else:
            self._step.calls += 1  # also in a pass that reduces nothing
            variables = [variable for _, variable in pairs]
            sums = self._aggregation.compute_gradients([gradient for gradient, _ in pairs], variables)
            pairs = list(zip(sums, variables, strict=True))
        self._waiting_here().update(_by_identity(pairs))  # not before: after a failure, nothing is reduced
        return pairs

    def aggregate(self, bare: Callable[..., Any], grads_and_vars: Iterable[tuple[Any, Any]]) -> Pairs:
        """Reduce gradients by ``bare``, unless they were computed here: a loss scaler calls this before it applies them."""
        pairs = list(grads_and_vars)
        if self._step.reduced or not self._are_reduced(pairs):
            return list(bare(pairs))
        with self._step.with_reduced():
            return list(bare(pairs))

    def apply(
        self, bare: Callable[..., Any], grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """Apply gradients by ``bare``. Those that were computed here, and not applied yet, are reduced already.

        Gradients may be computed in one graph, or eagerly, and be applied elsewhere. Raises InvalidArgument, on every rank,
        if gradients of both kinds are passed.
        """
        pairs = list(grads_and_vars)
        if not self._are_reduced(pairs):
            return bare(pairs, *args, **kwargs)

        def applied() -> Any:
            with self._step.with_reduced():
                return bare(pairs, *args, **kwargs)

        if self._aggregation is None:
            result = applied()
        else:
            self._build([variable for _, variable in pairs])
            result = self._aggregation.apply_gradients(applied, self._optimizer, pairs)
        here = self._waiting_here()
        for key in _by_identity(pairs):
            here.pop(key, None)
        return result

    def forget_passes(self) -> None:
        """Begin the present sums of several passes again. Gradients that were computed in another world do not count."""
        self._waiting.clear()
        if self._aggregation is not None and self._aggregation.counter is not None:
            self._aggregation.counter.assign(0)

    def _waiting_here(self) -> Variables:
        """Return what waits eagerly, or in the graph that is being made. A graph within a graph counts as the outer one."""
        if tf.executing_eagerly():
            return self._waiting
        graph = tf.compat.v1.get_default_graph()
        is_eager_around = tf.compat.v1.executing_eagerly_outside_functions()
        while (outer := getattr(graph, "outer_graph", None)) is not None and (
            outer.building_function or not is_eager_around
        ):
            graph = outer
        return self._waiting_in.setdefault(graph, {})

    def _are_reduced(self, pairs: Pairs) -> bool:
        keys = set(_by_identity(pairs))
        # First what was computed in the same place; then what a function has computed for eager code, or the reverse.
        others = [*self._waiting_in.values()] if tf.executing_eagerly() else [self._waiting]
        for waiting in (self._waiting_here(), *others):
            there = keys & set(waiting)
            if there and there != keys:
                raise InvalidArgument(
                    f"{type(self._optimizer).__name__}.apply_gradients() got gradients of {len(there)} variables that "
                    f"compute_gradients() has reduced, and of {len(keys - there)} others; apply them in separate calls"
                )
            if there:
                return True
        return False

    def _build(self, variables: list[Any]) -> None:
        """Create the variables of the optimizer, which cannot be created within a condition."""
        with tf.init_scope():
            if family_of(self._optimizer) is KerasFamily.TF_KERAS_OLDER:
                _ = self._optimizer.iterations  # this creates it
                self._optimizer._create_all_weights(variables)
            else:
                self._optimizer.build(variables)


def _by_identity(pairs: Pairs) -> Variables:
    return {identity(variable): variable for _, variable in pairs}


class _AggregationOfOptimizer(Aggregation):
    """The sums of an optimizer of Keras, which belong to variables, as its calls may have different ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: Variables = {}  # so that no other object gets the identity of a variable

    def _key(self, at: int, variable: Any) -> int:
        self._held[identity(variable)] = variable
        return identity(variable)

    def __deepcopy__(self, memo: dict[int, Any]) -> Aggregation:
        return self  # a copy of the optimizer is not distributed


def reducing_in_compute_gradients(make: F) -> F:
    """Return ``make``, which makes an optimizer distributed, but with ``reduces_in_compute_gradients`` for the optimizer."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return reduces_in_compute_gradients(make(*args, **kwargs))

    return cast("F", made)


def reduces_in_compute_gradients(optimizer: Any) -> Any:
    """Make ``compute_gradients`` of the distributed ``optimizer`` return reduced gradients, and return the optimizer.

    An optimizer of Keras 3 and a loss scaler stay as they are.
    """
    family, step = family_of(optimizer), step_of(optimizer)
    vars(optimizer)["_agg_helper"] = None
    if family is KerasFamily.KERAS3 or step is None or hasattr(optimizer, "inner_optimizer"):
        return optimizer
    aggregation = None
    if step.passes > 1:
        averages, process_set = step.divisor > 1, step.reducer.reduction.process_set
        # The step knows which variables are local, and scales their gradients.
        aggregation = _AggregationOfOptimizer(step.passes, step.reduce, True, averages, process_set, scales=False)
    computed = ComputedGradients(optimizer, step, aggregation)
    if family is KerasFamily.TF_KERAS_OLDER:
        meet(optimizer, "_compute_gradients", computed.compute)
        meet(optimizer, "_aggregate_gradients", computed.aggregate)
        vars(optimizer)["compute_gradients"] = types.MethodType(_with_newer_name, optimizer)
    else:
        meet(optimizer, "compute_gradients", computed.compute)
        meet(optimizer, "aggregate_gradients", computed.aggregate)
        vars(optimizer)["_compute_gradients"] = types.MethodType(_with_older_name, optimizer)
    meet(optimizer, "apply_gradients", computed.apply)
    vars(optimizer)["_ddl_computed"] = computed
    vars(optimizer)["_agg_helper"] = aggregation
    return optimizer


def _with_newer_name(optimizer: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
    return optimizer._compute_gradients(loss, var_list, None, tape)


def _with_older_name(optimizer: Any, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
    return optimizer.compute_gradients(loss, var_list, tape)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model, and make its optimizer distributed; see ``ddl_tf.keras.load_model``."""
    model = keras.load_model(filepath, custom_optimizers, custom_objects, compression, legacy_opts)
    optimizer = getattr(model, "optimizer", None)
    if step_of(optimizer) is not None:
        reduces_in_compute_gradients(optimizer)
    return model


def computed_gradients_of(optimizer: Any) -> ComputedGradients | None:
    """Return the object that reduces what ``compute_gradients`` of ``optimizer`` computes, if there is one.

    ``optimizer`` may also be a loss scaler around such an optimizer.
    """
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        found = getattr(one, "__dict__", {}).get("_ddl_computed")
        if isinstance(found, ComputedGradients) and found._optimizer is one:
            return found
    return None
