"""Elastic training for PyTorch: what ``horovod.torch.elastic`` has, but no failure makes a rank repeat applied steps."""

from __future__ import annotations

from ddl_torch.elastic.sampler import ElasticSampler, GlobalBatchSampler
from ddl_torch.elastic.state import TorchState
from ddlcore.api.elastic import HostsUpdatedInterrupt, ObjectState, State, run

__all__ = [
    "ElasticSampler",
    "GlobalBatchSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
