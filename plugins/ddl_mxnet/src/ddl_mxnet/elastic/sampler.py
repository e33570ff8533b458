"""The samplers of an elastic Gluon training, which deal an epoch's samples to whatever ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from mxnet.gluon.data import Sampler

from ddlcore.api import elastic, rank, size
from ddlcore.api.elastic import Positions


class ElasticSampler(Sampler):  # type: ignore[misc]  # MXNet has no types
    """A sampler that deals the samples of an epoch to whatever ranks there are, and goes on after a change of world.

    Use it as the ``sampler`` of a Gluon DataLoader, as a keyword of ``MXNetState``, and call ``record_batch`` after each step.
    Call ``set_epoch`` at the end of an epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._positions = Positions(len(dataset), shuffle, seed)
        self.dataset = dataset
        self.reset()

    @property
    def epoch(self) -> int:
        """The number of the present epoch."""
        return self._positions.epoch

    @property
    def processed_num(self) -> int:
        """How many samples of this epoch all ranks together have processed."""
        return self._positions.processed

    def reset(self) -> None:
        """Deal the remaining samples of this epoch to the present ranks."""
        self._rank, self._size = rank(), size()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that all ranks have processed a batch of ``batch_size`` samples each. ``batch_idx`` is not used."""
        positions = self._positions
        positions.processed = min(positions.processed + batch_size * self._size, positions.length)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch`` with all samples; to be called at the end of the epoch before."""
        self._positions.epoch, self._positions.processed = epoch, 0
        self.reset()

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many of its samples were processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was returned by ``state_dict``."""
        self._positions.epoch, self._positions.processed = state["epoch"], state["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions.deal(self._rank, self._size))

    def __len__(self) -> int:
        return self._positions.each(self._size)


class GlobalBatchSampler(elastic.GlobalBatchSampler, Sampler):  # type: ignore[misc]  # MXNet has no types
    """The ``ddlcore.api.elastic.GlobalBatchSampler`` as a sampler of Gluon: the ``batch_sampler`` of a DataLoader."""
