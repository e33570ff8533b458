"""The sampler that deals the samples of an epoch to whatever ranks there are."""

from __future__ import annotations

from ddl_torch import (
    elastic as _elastic,
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


class ElasticSampler(_elastic.ElasticSampler):
    """The sampler of ``ddl_torch.elastic``, with the attributes of Horovod's, which can be read and not set."""

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self._shuffle

    @property
    def seed(self) -> int:
        """The seed of these orders."""
        return self._seed

    @property
    def rank(self) -> int:
        """The rank to which this sampler deals."""
        return self._rank

    @property
    def num_replicas(self) -> int:
        """The number of ranks to which the samples are dealt."""
        return self._size

    @property
    def num_samples(self) -> int:
        """How many samples each rank gets."""
        return len(self)

    @property
    def total_size(self) -> int:
        """How many samples all ranks together get, with those that fill up."""
        return self.num_samples * self.num_replicas

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that are dealt, in their order."""
        return self._after(self._dealt_from)
