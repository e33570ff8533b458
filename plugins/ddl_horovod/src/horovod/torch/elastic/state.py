"""The elastic state of a PyTorch training."""

from __future__ import annotations

from ddl_torch import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ddl_torch.elastic import (
    ElasticSampler,
    TorchState,
)

from ddlcore.api import (
    rank,
)
from horovod.common.elastic import (
    ObjectState,
)

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "TorchState",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "rank",
]
