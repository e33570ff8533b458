"""Elastic training: a decorated training function goes on when ranks are lost and when new ranks join."""

from __future__ import annotations

from ddl_horovod.beginning import (
    init,
)
from ddl_torch.elastic import (
    run,
)

from ddlcore.api import (
    shutdown,
)
from horovod.common.elastic import (
    run_fn,
)
from horovod.torch.elastic.sampler import (
    ElasticSampler,
)
from horovod.torch.elastic.state import (
    TorchState,
)

__all__ = [
    "ElasticSampler",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]
