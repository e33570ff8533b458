"""Says which Keras is in use and of which family an optimizer is: Keras 3, tf_keras, or tf_keras' older family; imports none unasked."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import Any

import tensorflow as tf

__all__ = ["Family", "family_of", "the_keras"]


class Family(Enum):
    """An optimizer's family: they differ in where a gradient can be met on its way."""

    KERAS3 = "Keras 3"
    TF_KERAS = "tf_keras"
    TF_KERAS_OLDER = "tf_keras.optimizers.legacy"


# The base classes by name, so that an optimizer of one Keras is told without an import of the other.
_FAMILIES = {
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer"): Family.KERAS3,
    ("tf_keras.src.optimizers.optimizer", "Optimizer"): Family.TF_KERAS,
    ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2"): Family.TF_KERAS_OLDER,
}


def the_keras() -> Any:
    """The module that ``tf.keras`` stands for: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1 asks for it.

    Raises ImportError where it is Keras 3 on a backend other than TensorFlow.
    """
    named = os.environ.get("KERAS_BACKEND", "tensorflow")
    if named != "tensorflow" and "keras" not in sys.modules and not _legacy_is_asked_for():
        raise ImportError(_wrong_backend(named))
    keras = tf.keras
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ImportError(_wrong_backend(backend))
    return keras


def family_of(optimizer: Any) -> Family | None:
    """What an object is as an optimizer; None where it is none of Keras'."""
    for ancestor in type(optimizer).__mro__:
        family = _FAMILIES.get((ancestor.__module__, ancestor.__name__))
        if family is not None:
            return family
    return None


def _legacy_is_asked_for() -> bool:
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def _wrong_backend(backend: str) -> str:
    return (
        f"ddl_tf.keras works on Keras' TensorFlow backend, but the backend is {backend!r}; "
        "set KERAS_BACKEND=tensorflow before Keras is imported"
    )
