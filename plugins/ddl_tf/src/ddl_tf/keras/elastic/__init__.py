"""Elastic training for Keras, with the names of ``horovod.tensorflow.keras.elastic``; for Keras 3 and tf_keras."""

from __future__ import annotations

from ddl_tf.keras.elastic.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from ddl_tf.keras.elastic.state import KerasState
from ddlcore.api.elastic import GlobalBatchSampler, HostsUpdatedInterrupt, run

__all__ = [
    "CommitStateCallback",
    "GlobalBatchSampler",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
