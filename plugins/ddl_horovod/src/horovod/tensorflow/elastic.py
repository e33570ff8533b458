"""Elastic training: a decorated training function goes on when ranks are lost and when new ranks join."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddl_horovod.beginning import (
    init,
)
from ddl_tf import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ddl_tf.elastic import (
    TensorFlowState,
    run,
)

from ddlcore.api import (
    rank,
    shutdown,
)
from horovod.common.elastic import (
    HorovodInternalError,
    ObjectState,
    run_fn,
)

__all__ = [
    "HorovodInternalError",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]

if TYPE_CHECKING:
    from ddl_horovod.keras_states import TensorFlowKerasState


def __getattr__(name: str) -> Any:
    """Import ``TensorFlowKerasState``, which needs Keras, when it is first used."""
    if name == "TensorFlowKerasState":
        return import_module("ddl_horovod.keras_states").TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
