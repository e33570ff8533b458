"""The fusion contract: which of the tensors that are ready share a bucket, and in which order the buckets run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["FusionPolicy", "Ready"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A tensor that is ready on all members. Only tensors with equal ``key`` may share a bucket."""

    name: str
    key: object  # process set, type, op, scales, device, compressor: these must be equal in one bucket
    nbytes: int
    time_s: float = 0.0  # time from the beginning of the period, on the slowest rank; 0 during negotiation
    group: str | None = None  # the same for all tensors of one grouped call


class FusionPolicy(Protocol):
    """An object that groups tensors into buckets. The same tensors and parameters must give the same buckets."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        """Return the buckets in the order in which they run; each is a list of positions in ``ready``.

        Each position must occur exactly once.

        ``params`` contains at least ``fusion_bytes``. When a whole period is arranged, it also contains
        ``first_bucket_bytes``, where 0 means that the first bucket has no limit of its own. Tensors of ragged kinds are
        never passed to this method.
        """
        ...
