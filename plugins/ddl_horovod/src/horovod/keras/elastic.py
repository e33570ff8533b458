"""Elastic training with Keras."""

from __future__ import annotations

from ddl_horovod.keras_states import (
    KerasState,
    TensorFlowKerasState,
)
from ddl_tf.keras.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
