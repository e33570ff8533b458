"""Samplers that deal an epoch's samples to whatever ranks there are: that of Horovod, and one of global batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from torch.utils.data import Sampler

from ddlcore.api import elastic, rank, size
from ddlcore.api.elastic import Positions


class ElasticSampler(Sampler[int]):
    """A sampler that divides the samples of an epoch among the present ranks.

    After a change of world, the sampler divides the remaining samples among the new ranks. Use it as the ``sampler`` of
    a DataLoader and as a keyword of ``TorchState``. Call ``record_batch`` after each step, and ``set_epoch`` at the end
    of each epoch.
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
        """Divide the remaining samples of this epoch among the present ranks."""
        self._rank, self._size = rank(), size()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed one batch of ``batch_size`` samples. ``batch_idx`` is not used."""
        positions = self._positions
        positions.processed = min(positions.processed + batch_size * self._size, positions.length)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch``, in which all samples are unprocessed again.

        Call this method at the end of the previous epoch.
        """
        self._positions.epoch, self._positions.processed = epoch, 0
        self.reset()

    def state_dict(self) -> dict[str, int]:
        """Return a dict with the number of the epoch and the number of samples of this epoch that were processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the epoch at the position that it had when ``state_dict`` returned ``state``."""
        self._positions.epoch, self._positions.processed = state["epoch"], state["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions.deal(self._rank, self._size))

    def __len__(self) -> int:
        return self._positions.each(self._size)


class GlobalBatchSampler(elastic.GlobalBatchSampler, Sampler[list[int]]):
    """The ``ddlcore.api.elastic.GlobalBatchSampler`` as a batch sampler of torch: the ``batch_sampler`` of a DataLoader."""
