"""Finds which Keras is in use, and to which Keras an optimizer belongs. Only ``the_keras`` imports Keras."""

from __future__ import annotations

from enum import Enum
from typing import Any

import tensorflow as tf


class KerasFamily(Enum):
    """The Keras that an optimizer belongs to: Keras 3, tf_keras, or the older optimizers of tf_keras.

    The family determines which method of the optimizer receives the gradients.
    """

    KERAS3 = "Keras 3"
    TF_KERAS = "tf_keras"
    TF_KERAS_OLDER = "tf_keras.optimizers.legacy"


ADVICE = "ddl_tf.keras works on Keras' TensorFlow backend; set KERAS_BACKEND=tensorflow before Keras is imported"

# The base classes are compared by name, so that recognizing an optimizer of one Keras does not import the other.
_FAMILIES = {
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer"): KerasFamily.KERAS3,
    ("tf_keras.src.optimizers.optimizer", "Optimizer"): KerasFamily.TF_KERAS,
    ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2"): KerasFamily.TF_KERAS_OLDER,
}


def the_keras() -> Any:
    """Return the module that ``tf.keras`` refers to: Keras 3, or tf_keras if TF_USE_LEGACY_KERAS=1 is set.

    Raises ImportError if Keras cannot be imported, or if it is Keras 3 with a backend other than TensorFlow.
    """
    keras = tf.keras
    try:
        backend = keras.backend.backend()  # tf.keras is imported lazily, at this point
    except ImportError as error:
        raise ImportError(f"Keras cannot be imported ({_cause(error)}). {ADVICE}") from error
    if backend != "tensorflow":
        raise ImportError(f"Keras' backend is {backend!r}. {ADVICE}")
    return keras


def family_of(optimizer: Any) -> KerasFamily | None:
    """Return which Keras ``optimizer`` belongs to, or None if the object is not a Keras optimizer."""
    for ancestor in type(optimizer).__mro__:
        family = _FAMILIES.get((ancestor.__module__, ancestor.__name__))
        if family is not None:
            return family
    return None


def _cause(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes of ``error``.

    That error may say, for example, that the backend is not installed.
    """
    while error.__context__ is not None:
        error = error.__context__
    return error
