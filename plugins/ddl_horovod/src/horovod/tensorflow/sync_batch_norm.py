"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from ddl_tf.keras import (
    SyncBatchNormalization,
)

from ddlcore.api import (
    rank,
    size,
)
from ddlcore.types import (
    Sum,
)

__all__ = [
    "Sum",
    "SyncBatchNormalization",
    "rank",
    "size",
]
