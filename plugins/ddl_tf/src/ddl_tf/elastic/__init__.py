"""Elastic training for TensorFlow, with what ``horovod.tensorflow.elastic`` has.

Unlike there, a failure makes no rank repeat applied steps.
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
    """Import the state that needs Keras only when it is used, because a script that uses sessions needs no Keras."""
    if name == "TensorFlowKerasState":
        return import_module("ddl_tf.keras.elastic.state").TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
