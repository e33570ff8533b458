"""Which variables stay a rank's own: their gradients are not reduced, but scaled as an average would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ddl_tf.averages import divided
from ddl_tf.reducer import Reducer

__all__ = ["LocalVariables", "identity", "variable_of"]


class LocalVariables:
    """The local ones among the variables of one tape or optimizer. ``scale``: their gradients are divided by the size."""

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._variables: list[Any] = []  # held, so that no other takes the identity over
        self._layers: list[Any] = []

    def register(self, variable: Any) -> None:
        """This variable is local. Raises ValueError for what is no variable."""
        if not hasattr(variable, "assign"):
            raise ValueError(f"a local source is a variable, not a {type(variable).__name__}")
        self._variables.append(variable)

    def register_layers(self, layers: Iterable[Any]) -> None:
        """So are the variables of these layers, once they are built. Raises ValueError for what is no layer."""
        for layer in layers:
            if not hasattr(layer, "trainable_weights"):
                raise ValueError(f"local_layers takes layers of Keras, not {type(layer).__name__}")
            self._layers.append(layer)

    def holds(self, variable: Any) -> bool:
        """Whether it is local."""
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
        """The gradients, in the same places: reduced, but for the local ones.

        ``chosen`` tells who reduces, by the variables that are no local ones: ranks need not have the others alike.
        """
        local = self._all()
        if not local:
            return list(chosen(variables).reduce(gradients, variables))
        shared = [i for i, variable in enumerate(variables) if identity(variable) not in local]
        others = [variables[i] for i in shared]
        reducer = chosen(others)
        results = [self._scaled(gradient, len(reducer.ranks)) for gradient in gradients]
        if shared:
            for i, gradient in zip(shared, reducer.reduce([gradients[i] for i in shared], others), strict=True):
                results[i] = gradient
        return results

    def _scaled(self, gradient: Any, ranks: int) -> Any:
        if gradient is None or not self._scale or ranks <= 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(divided(gradient.values, ranks), gradient.indices, gradient.dense_shape)
        return divided(gradient, ranks)


def variable_of(source: Any) -> Any:
    """TensorFlow's own variable, where Keras' is wrapped around it, too; None for what is no variable."""
    if isinstance(source, tf.Variable):
        return source
    inner = getattr(source, "_value", None)  # of Keras 3; ``value`` may be a copy in another type
    return inner if isinstance(inner, tf.Variable) else None


def identity(variable: Any) -> int:
    """What tells variables apart."""
    inner = variable_of(variable)
    return id(variable if inner is None else inner)
