"""What code needs that does something in some steps only, eagerly or in a graph of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def only_if(condition: Any, function: Callable[[], list[Any]]) -> list[Any]:
    """Call ``function`` if ``condition`` is true, when the graph runs. Return what must be waited for, [] eagerly.

    ``function`` returns operations or tensors, which have run when what this returns has.
    """
    if tf.executing_eagerly():
        if condition:
            function()
        return []

    def called() -> Any:
        with tf.control_dependencies(function()):
            return tf.constant(True)

    return [tf.cond(condition, called, lambda: tf.constant(False))]


def local_variable(value: Any, name: str) -> Any:
    """Return a variable of this rank with the first value ``value``. In a session, local_variables_initializer() sets it."""
    return tf.compat.v1.Variable(
        value,
        trainable=False,
        name=f"ddl_{name}",
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        use_resource=True,
    )
