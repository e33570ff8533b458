"""Elastic training for PyTorch, with the names of ``horovod.torch.elastic``.

Unlike in Horovod, no failure makes a rank repeat steps that were already applied.
"""

from __future__ import annotations

from ddl_torch.elastic.process_group import process_group
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
    "process_group",
    "run",
]
