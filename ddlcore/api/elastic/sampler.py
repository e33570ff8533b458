"""Assigns the samples of an epoch to the ranks, for elastic samplers. The number of ranks may change in an epoch."""

from __future__ import annotations

import random

from ddlcore.errors import InvalidArgument

__all__ = ["Positions"]


class Positions:
    """The order in which the ranks use the ``length`` samples of a dataset in each epoch.

    A position is the index of a sample in the dataset. The order of an epoch depends only on ``seed`` and ``epoch``; if
    ``shuffle`` is false, it is always 0, 1, 2, …. ``processed`` is how many positions of the epoch all ranks together
    have used. ``deal`` distributes the remaining positions among the ranks.
    """

    def __init__(self, length: int, shuffle: bool = True, seed: int = 0) -> None:
        if length < 1:
            raise InvalidArgument("an elastic sampler needs a dataset with samples; this one has none")
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed = 0

    def remaining(self) -> list[int]:
        """Return the positions that no rank has used in this epoch, in the order of the epoch."""
        order = list(range(self.length))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order[self.processed :]

    def each(self, size: int) -> int:
        """Return how many of the remaining positions each rank gets in a world of ``size`` ranks, rounded up."""
        return -(-(self.length - self.processed) // size)

    def deal(self, rank: int, size: int) -> list[int]:
        """Return the remaining positions that ``rank`` must use in a world of ``size`` ranks.

        All ranks get equally many positions. If the remaining positions cannot be divided evenly, some positions are
        given to more than one rank. The result is empty if no positions remain.
        """
        rest = self.remaining()
        if not rest:
            return []
        total = self.each(size) * size
        padded = (rest * -(-total // len(rest)))[:total]
        return padded[rank:total:size]
