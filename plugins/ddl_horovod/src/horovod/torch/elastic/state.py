"""The elastic state of a PyTorch training."""

from __future__ import annotations

from typing import Any

from ddl_torch import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ddl_torch import (
    elastic as _elastic,
)

from ddlcore.api import (
    rank,
)
from horovod.common.elastic import (
    ObjectState,
)
from horovod.torch.elastic.sampler import (
    ElasticSampler,
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


class TorchState(_elastic.TorchState):
    """The elastic state of ``ddl_torch.elastic`` with another default: ``rollback="commit"``.

    A script for Horovod counts its batches from commit to commit. With ``rollback="step"``, the model would have more batches
    than the counters of the script say.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, *, rollback: str = "commit", **kwargs: Any) -> None:
        super().__init__(model, optimizer, rollback=rollback, **kwargs)
