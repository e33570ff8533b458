"""The sampler that deals the samples of an epoch to whatever ranks there are."""

from __future__ import annotations

from ddl_torch.elastic import (
    ElasticSampler,
)

from ddlcore.api import (
    rank,
    size,
)

__all__ = [
    "ElasticSampler",
    "rank",
    "size",
]
