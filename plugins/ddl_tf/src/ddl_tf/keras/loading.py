"""Loads a saved Keras model so that training goes on with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddl_tf.keras import seams
from ddl_tf.keras.families import Family, family_of, the_keras
from ddl_tf.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """The model that Keras finds in ``filepath``, its optimizer, with the state that was saved, made distributed.

    ``custom_optimizers`` are optimizers of the user's own, known in the file by their class's name; ``custom_objects``
    is Keras' argument of that name. Only ranks that load the file have what is in it: load on all, or broadcast after.
    ``legacy_opts`` is accepted for Horovod's sake: which optimizers there are, the file says.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = the_keras().models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if family_of(optimizer) is not None:
        DistributedOptimizer(optimizer, compression=compression)
        if family_of(optimizer) is Family.KERAS3:
            seams.settle_jit(model, "auto")  # the file holds what it came to when it was saved, not who asked
    return model
