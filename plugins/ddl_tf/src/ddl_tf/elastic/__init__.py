"""Elastic training for TensorFlow, with the names of ``horovod.tensorflow.elastic``.

Unlike in Horovod, no failure makes a rank repeat steps that were already applied.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddl_tf.elastic.state import TensorFlowState
from ddlcore.api.elastic import GlobalBatchSampler, HostsUpdatedInterrupt, ObjectState, State, run

__all__ = [
    "GlobalBatchSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]

if TYPE_CHECKING:
    from ddl_tf.keras.elastic.state import TensorFlowKerasState


def __getattr__(name: str) -> Any:
    """Import ``TensorFlowKerasState``, which needs Keras, when it is first used.

    A script that uses sessions needs no Keras.
    """
    if name == "TensorFlowKerasState":
        return import_module("ddl_tf.keras.elastic.state").TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
