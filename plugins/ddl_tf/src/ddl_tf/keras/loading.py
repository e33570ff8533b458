"""Loads a saved Keras model so that training continues with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddl_tf.keras import seams
from ddl_tf.keras.families import KerasFamily, family_of, the_keras
from ddl_tf.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model with Keras from ``filepath``, make its optimizer distributed, and return the model.

    The file also contains the optimizer's state. ``custom_optimizers`` are the user's own optimizer classes; the file
    refers to them by class name. ``custom_objects`` is Keras' argument of that name. Only ranks that load the file get
    its contents: load the file on all ranks, or broadcast the variables afterwards. ``legacy_opts`` is accepted for
    compatibility with Horovod and has no effect, because the file says which optimizers it contains.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = the_keras().models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if family_of(optimizer) is not None:
        DistributedOptimizer(optimizer, compression=compression)
        if family_of(optimizer) is KerasFamily.KERAS3:
            seams.settle_jit(model, "auto")  # the file holds the value in effect, not whether the user asked for it
    return model
