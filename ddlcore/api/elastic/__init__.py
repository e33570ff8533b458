"""Elastic training: a decorated training function goes on when ranks are lost and when new ranks join."""

from __future__ import annotations

from ddlcore.api.elastic.global_batches import GlobalBatchSampler
from ddlcore.api.elastic.loop import run
from ddlcore.api.elastic.sampler import ElasticSampler
from ddlcore.api.elastic.state import ObjectState, State, StepState
from ddlcore.errors import HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "GlobalBatchSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "StepState", "run"]
