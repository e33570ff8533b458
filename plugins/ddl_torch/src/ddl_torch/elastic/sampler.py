"""Samplers that deal an epoch's samples to whatever ranks there are: that of Horovod, and one of global batches."""

from __future__ import annotations

from torch.utils.data import Sampler

from ddlcore.api import elastic


class ElasticSampler(elastic.ElasticSampler, Sampler[int]):
    """A sampler that divides the samples of an epoch among the present ranks.

    After a change of world, the sampler divides the remaining samples among the new ranks. Use it as the ``sampler`` of
    a DataLoader and as a keyword of ``TorchState``. Call ``record_batch`` after each step, and ``set_epoch`` at the end
    of each epoch.
    """


class GlobalBatchSampler(elastic.GlobalBatchSampler, Sampler[list[int]]):
    """The ``ddlcore.api.elastic.GlobalBatchSampler`` as a batch sampler of torch: the ``batch_sampler`` of a DataLoader."""
