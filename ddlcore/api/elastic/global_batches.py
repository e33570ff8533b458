"""Deals the batches of an epoch to whatever ranks there are, so that a step has the same samples on any number of them."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from ddlcore.api.elastic.sampler import EpochSampler
from ddlcore.api.weights import Share
from ddlcore.api.world import rank, size
from ddlcore.errors import InvalidArgument

__all__ = ["GlobalBatchSampler", "rows_of_ranks"]


def rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Return how many of the ``rows`` of a batch each rank gets: the first ``rows % ranks`` ranks get one more."""
    return [rows // ranks + (one < rows % ranks) for one in range(ranks)]


class GlobalBatchSampler(EpochSampler):
    """A batch sampler that deals each global batch of an epoch to the present ranks, unevenly if it must.

    A *global batch* is the ``global_batch`` next positions of the epoch's order, which depends on ``seed`` and the epoch
    alone. So step k has the same samples on any number of ranks. Iterating yields, for each global batch that is left, the
    positions of this rank: a consecutive part of it. All ranks get equally many batches. The last batch of an epoch may
    be smaller; ``drop_last`` leaves it out.

    With the average over samples, the model is the same on any number of ranks, too: give ``sampler.share`` to
    ``DistributedOptimizer(weight=…)``. A rank that gets no row of a batch, because it has fewer rows than there are
    ranks, is dealt the batch's first row in its place, so that models and loaders need not handle empty batches; its share is
    0, so this row counts nothing.

    Call ``record_batch`` after each step that was applied, and ``set_epoch`` at the end of an epoch. Loaders may draw
    batches ahead: what counts is what was recorded. Give it to an elastic state as a keyword. ``dataset`` is the data or
    the number of its samples. Raises ValueError for invalid arguments.
    """

    def __init__(
        self, dataset: Sized | int, global_batch: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
            raise InvalidArgument(
                f"GlobalBatchSampler: global_batch={global_batch!r}; pass how many samples all ranks together use in a step"
            )
        length = len(dataset) if isinstance(dataset, Sized) else dataset
        super().__init__(length, shuffle, seed)
        self._end = length - length % global_batch if drop_last else length
        if not self._end:
            raise InvalidArgument(
                f"GlobalBatchSampler: global_batch={global_batch} with drop_last leaves nothing of {length} samples"
            )
        self.global_batch = global_batch
        self.drop_last = drop_last

    def _rows(self, ahead: int) -> int:
        """Return the size of the global batch that comes ``ahead`` batches after the next one; 0 if there is none."""
        return max(0, min(self.global_batch, self._end - self._processed - ahead * self.global_batch))

    def share(self, ahead: int = 0) -> Share:
        """Return how much of the next global batch this rank has: the weight of its values in an average over samples.

        The next batch is the first one that ``record_batch`` has not recorded. ``ahead`` counts from there: with two
        backward passes for each step, the second has ``share(1)``. Raises ValueError if the epoch has no such batch.
        """
        rows = self._rows(ahead)
        if not rows:
            raise InvalidArgument(
                f"GlobalBatchSampler.share(): epoch {self.epoch} has no further batch; call record_batch() once for each "
                "step, after the step, and set_epoch() at the end of an epoch"
            )
        return Share(rows_of_ranks(rows, size())[rank()], rows, size())

    def record_batch(self, batches: int = 1) -> None:
        """Note that a step with the next ``batches`` global batches was applied. All ranks must call it.

        Raises ValueError if the epoch has fewer batches.
        """
        if batches < 1 or not self._rows(batches - 1):
            raise InvalidArgument(
                f"GlobalBatchSampler.record_batch({batches}): {len(self)} batches of epoch {self.epoch} are not recorded; "
                "call it once for each step, and set_epoch() at the end of an epoch"
            )
        self._processed = min(self._processed + batches * self.global_batch, self._end)

    def __iter__(self) -> Iterator[list[int]]:
        me, ranks = rank(), size()
        rest = self._after(self._processed)[: self._end - self._processed]
        for begin in range(0, len(rest), self.global_batch):
            batch = rest[begin : begin + self.global_batch]
            rows = rows_of_ranks(len(batch), ranks)
            first = sum(rows[:me])
            yield batch[first : first + rows[me]] or batch[:1]

    def __len__(self) -> int:
        """Return how many batches of this epoch are not recorded, which is how many iterating yields."""
        return -(-(self._end - self._processed) // self.global_batch)
