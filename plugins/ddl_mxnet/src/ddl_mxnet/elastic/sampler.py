"""The samplers of an elastic Gluon training, which deal an epoch's samples to whatever ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from mxnet.gluon.data import Sampler

from ddlcore.api import elastic, rank, size
from ddlcore.api.elastic import Positions


class ElasticSampler(Sampler):  # type: ignore[misc]  # MXNet has no types
    """A sampler that distributes the samples of an epoch among the ranks of the world.

    When ranks are added or lost during an epoch, the samples that are left are distributed among the new ranks. Pass
    the sampler as ``sampler`` to a Gluon DataLoader, and as a keyword to ``MXNetState``. Call ``record_batch`` after
    each step, and ``set_epoch`` at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._positions = Positions(len(dataset), shuffle, seed)
        self.dataset = dataset
        self.reset()

    @property
    def epoch(self) -> int:
        """The number of the current epoch."""
        return self._positions.epoch

    @property
    def processed_num(self) -> int:
        """The number of samples of this epoch that all ranks together have processed."""
        return self._positions.processed

    def reset(self) -> None:
        """Distribute the samples of this epoch that are not processed yet among the ranks of the current world."""
        self._rank, self._size = rank(), size()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed one more batch of ``batch_size`` samples. ``batch_idx`` is not used."""
        positions = self._positions
        positions.processed = min(positions.processed + batch_size * self._size, positions.length)

    def set_epoch(self, epoch: int) -> None:
        """Begin the epoch with the number ``epoch``, with all samples. Call this at the end of the previous epoch."""
        self._positions.epoch, self._positions.processed = epoch, 0
        self.reset()

    def state_dict(self) -> dict[str, int]:
        """Return {"epoch": the number of the epoch, "processed_num": the number of its processed samples}."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the epoch and the sample that ``state``, a result of ``state_dict``, describes."""
        self._positions.epoch, self._positions.processed = state["epoch"], state["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions.deal(self._rank, self._size))

    def __len__(self) -> int:
        return self._positions.each(self._size)


class GlobalBatchSampler(elastic.GlobalBatchSampler, Sampler):  # type: ignore[misc]  # MXNet has no types
    """The ``ddlcore.api.elastic.GlobalBatchSampler`` as a sampler of Gluon: the ``batch_sampler`` of a DataLoader."""
