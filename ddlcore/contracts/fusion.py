"""The fusion contract: how a policy decides which ready tensors share a bucket, and in which order buckets run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["FusionPolicy", "Ready"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A tensor that is ready on all members of its process set. Only tensors with equal ``key`` may share a bucket."""

    name: str
    key: object  # process set, type, op, scales, device, compressor: these must be equal in one bucket
    nbytes: int
    time_s: float = 0.0  # time from the beginning of the period, on the slowest rank; 0 during negotiation
    group: str | None = None  # the same for all tensors of one grouped call


class FusionPolicy(Protocol):
    """An object that groups tensors into buckets. Equal calls must always give equal buckets."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        """Return the buckets in the order in which they run. Each bucket is a list of positions in ``ready``.

        Each position in ``ready`` must occur exactly once in the result.

        ``params`` contains at least the setting ``fusion_bytes``. When a whole period (all buckets of a schedule) is
        arranged, ``params`` also contains ``first_bucket_bytes``; 0 means that the first bucket has the same limit as
        the others. Tensors of ragged kinds (allgather, alltoall) are never passed to this method.
        """
        ...
