"""The fusion contract: which of the tensors that are ready share a bucket, and in which order the buckets run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["FusionPolicy", "Ready"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A tensor that is ready on every member. Only tensors with equal ``key`` may share a bucket."""

    name: str
    key: object  # process set, kind, type, op, scales, device, compressor: the same within one collective
    nbytes: int
    time_s: float = 0.0  # since the period began, on its slowest rank; 0 during negotiation
    group: str | None = None  # the same for all tensors of one grouped call


class FusionPolicy(Protocol):
    """A function that groups tensors into buckets. Pure: the same tensors and parameters give the same buckets."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        """Return the buckets in the order they run, as lists of positions in ``ready``.

        Each position occurs exactly once.

        ``params`` contains at least ``fusion_bytes``, and ``first_bucket_bytes`` when a whole period is arranged (0:
        the first bucket has no limit of its own). Ragged kinds are never passed to this method.
        """
        ...
