"""Assigns the samples of an epoch to the ranks, for elastic samplers. The number of ranks may change in an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice

from ddlcore.api.world import rank, size
from ddlcore.errors import InvalidArgument

__all__ = ["ElasticSampler", "EpochSampler"]


class EpochSampler:
    """The base class of elastic samplers: the order of each epoch, and how far all ranks together have come in it.

    A position is the index of one of the ``length`` samples of a dataset. The order of an epoch depends only on ``seed``
    and the epoch; if ``shuffle`` is false, it is always 0, 1, 2, ….
    """

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        if length < 1:
            raise InvalidArgument("an elastic sampler needs a dataset with samples; this one has none")
        self._length, self._shuffle, self._seed = length, shuffle, seed
        self._epoch = self._processed = 0

    @property
    def epoch(self) -> int:
        """The number of the present epoch."""
        return self._epoch

    @property
    def processed_num(self) -> int:
        """How many samples of this epoch all ranks together have processed, in steps that were recorded."""
        return self._processed

    def _after(self, begin: int) -> list[int]:
        """Return the positions of this epoch, in its order, without the first ``begin`` ones."""
        order = list(range(self._length))
        if self._shuffle:
            random.Random(self._seed + self._epoch).shuffle(order)
        return order[begin:]

    def reset(self) -> None:
        """Deal the remaining samples to the present ranks. Does nothing if they are only dealt in each iteration."""

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch`` with all samples; to be called at the end of the epoch before."""
        self._epoch, self._processed = epoch, 0
        self.reset()

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many of its samples were processed."""
        return {"epoch": self._epoch, "processed_num": self._processed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where ``state_dict`` was returned by the method of this name."""
        self._epoch, self._processed = state_dict["epoch"], state_dict["processed_num"]
        self.reset()


class ElasticSampler(EpochSampler):
    """A sampler that deals each rank equally many of the samples of an epoch. Frameworks make it one of their samplers.

    If the remaining samples cannot be divided evenly, some are given to more than one rank. The samples are dealt by
    ``reset``, so each iteration until the next ``reset`` has the same ones, and ``len`` stays.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(len(dataset), shuffle, seed)
        self.dataset = dataset
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples of this epoch among the present ranks."""
        self._rank, self._size, self._dealt_from = rank(), size(), self._processed

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed one batch of ``batch_size`` samples. ``batch_idx`` is not used."""
        self._processed = min(self._processed + batch_size * self._size, self._length)

    def __iter__(self) -> Iterator[int]:
        return islice(cycle(self._after(self._dealt_from)), self._rank, len(self) * self._size, self._size)

    def __len__(self) -> int:
        return -(-(self._length - self._dealt_from) // self._size)
