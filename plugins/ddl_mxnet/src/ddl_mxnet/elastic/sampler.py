"""The samplers of an elastic Gluon training, which deal an epoch's samples to whatever ranks there are."""

from __future__ import annotations

from mxnet.gluon.data import Sampler

from ddlcore.api import elastic


class ElasticSampler(elastic.ElasticSampler, Sampler):  # type: ignore[misc]  # MXNet has no types
    """A sampler that distributes the samples of an epoch among the ranks of the world.

    When ranks are added or lost during an epoch, the samples that are left are distributed among the new ranks. Pass
    the sampler as ``sampler`` to a Gluon DataLoader, and as a keyword to ``MXNetState``. Call ``record_batch`` after
    each step, and ``set_epoch`` at the end of each epoch.
    """


class GlobalBatchSampler(elastic.GlobalBatchSampler, Sampler):  # type: ignore[misc]  # MXNet has no types
    """The ``ddlcore.api.elastic.GlobalBatchSampler`` as a sampler of Gluon: the ``batch_sampler`` of a DataLoader."""
