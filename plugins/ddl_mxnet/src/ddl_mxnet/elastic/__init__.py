"""Elastic training for MXNet's Gluon. The interface is the same as in ``ddl_torch.elastic``.

Horovod has no elastic training for MXNet.
"""

from __future__ import annotations

from ddl_mxnet.elastic.sampler import ElasticSampler, GlobalBatchSampler
from ddl_mxnet.elastic.state import MXNetState
from ddlcore.api.elastic import HostsUpdatedInterrupt, ObjectState, State, run

__all__ = [
    "ElasticSampler",
    "GlobalBatchSampler",
    "HostsUpdatedInterrupt",
    "MXNetState",
    "ObjectState",
    "State",
    "run",
]
