"""Records which variables are local to a rank: their gradients are not reduced, but may be divided as in an average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf import present
from ddl_tf.averages import divided
from ddl_tf.reducer import Reducer


class LocalVariables:
    """The variables of one tape or optimizer that each rank keeps for itself: their gradients are not reduced.

    If ``scale`` is true, these gradients are divided by the number of ranks.
    """

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._variables: list[Any] = []  # kept alive, so that no other object gets the same identity
        self._layers: list[Any] = []

    def register(self, variable: Any) -> None:
        """Make ``variable`` local to this rank. Raises ValueError if the argument is not a variable."""
        if not hasattr(variable, "assign"):
            raise ValueError(f"a local source is a variable, not a {type(variable).__name__}")
        self._variables.append(variable)

    def register_layers(self, layers: Any) -> None:
        """Make the variables of ``layers``, a layer or several or None, local to this rank.

        The layers must be built before the first gradient is reduced. Raises ValueError for what is not a layer.
        """
        for layer in [] if layers is None else listed(layers):
            if not hasattr(layer, "trainable_weights"):
                raise ValueError(f"local_layers takes layers of Keras, not {type(layer).__name__}")
            self._layers.append(layer)

    def holds(self, variable: Any) -> bool:
        """Return whether ``variable`` is local to this rank."""
        return identity(variable) in self._all()

    def _all(self) -> set[int]:
        for layer in self._layers:
            if not layer.built:
                raise ValueError(
                    f"local layer {layer.name!r} is not built, so none of its variables could stay local; "
                    "call it on a batch first, or leave it out of local_layers"
                )
        variables = [variable for layer in self._layers for variable in layer.trainable_weights]
        return {identity(variable) for variable in (*variables, *self._variables)}

    def reduce(
        self, chosen: Callable[[Sequence[Any]], Reducer], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Return a list of results for ``gradients``, in the same order: local ones scaled, all other ones reduced.

        ``variables`` are the variables of ``gradients``. ``chosen`` is a function that returns the reducer for the
        variables that are not local. Only these variables are passed to ``chosen``, because the ranks may have
        different local variables.
        """
        local = self._all()
        if not local:
            return list(chosen(variables).reduce(gradients, variables))
        shared = [i for i, variable in enumerate(variables) if identity(variable) not in local]
        others = [variables[i] for i in shared]
        reducer = chosen(others)
        results = [self._scaled(gradient, reducer) for gradient in gradients]
        if shared:
            for i, gradient in zip(shared, reducer.reduce([gradients[i] for i in shared], others), strict=True):
                results[i] = gradient
        return results

    def _scaled(self, gradient: Any, reducer: Reducer) -> Any:
        if gradient is None or not self._scale or not reducer.active:
            return gradient
        given = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        ranks = present.count_of_members(reducer.reduction.process_set, given)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(divided(gradient.values, ranks), gradient.indices, gradient.dense_shape)
        return divided(gradient, ranks)


def listed(given: Any) -> list[Any]:
    """Return ``given``, one object or a collection of several, as a list."""
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def variable_of(source: Any) -> Any:
    """Return ``source`` if it is a TensorFlow variable, or the TensorFlow variable inside a Keras variable.

    Returns None if ``source`` is neither.
    """
    if isinstance(source, tf.Variable):
        return source
    inner = getattr(source, "_value", None)  # Keras 3; its ``value`` may be a copy of another type
    return inner if isinstance(inner, tf.Variable) else None


def identity(variable: Any) -> int:
    """Return a number that identifies ``variable``.

    A Keras variable has the same number as the TensorFlow variable that it contains.
    """
    inner = variable_of(variable)
    return id(variable if inner is None else inner)
