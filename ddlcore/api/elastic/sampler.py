"""The positions of an epoch's samples that each rank of any number of ranks takes, for elastic samplers."""

from __future__ import annotations

import random

from ddlcore.errors import InvalidArgument

__all__ = ["Positions"]


class Positions:
    """A permutation of ``length`` positions for each epoch, of which the ranks take every ``size``-th.

    The order of an epoch depends on ``seed`` and the epoch alone. ``processed`` is how many positions of the epoch all
    ranks together have used; ``deal`` gives out the others.
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
        """Return the positions of this epoch that no rank has used, in order."""
        order = list(range(self.length))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order[self.processed :]

    def each(self, size: int) -> int:
        """Return how many positions each of ``size`` ranks gets of the remaining ones."""
        return -(-(self.length - self.processed) // size)

    def deal(self, rank: int, size: int) -> list[int]:
        """Return the positions in the data for ``rank`` in a world of ``size`` ranks.

        All ranks get equally many. If the positions that are left cannot be divided so, some of them are dealt to two
        ranks.
        """
        rest = self.remaining()
        if not rest:
            return []
        total = self.each(size) * size
        padded = (rest * -(-total // len(rest)))[:total]
        return padded[rank:total:size]
