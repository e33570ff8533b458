"""The fusion contract: which tensors that are ready together share a bucket, and in what order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["FusionPolicy", "Ready"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A tensor that every member has ready. Only tensors of equal ``key`` may share a bucket."""

    name: str
    key: object  # set, kind, type, op, scales, device, compressor: what one collective must have in common
    nbytes: int
    time_s: float = 0.0  # since the period began, on its slowest rank; 0 in discovery
    group: str | None = None  # tensors of one grouped call


class FusionPolicy(Protocol):
    """Pure and deterministic: the same tensors and parameters give the same buckets."""

    def arrange(self, ready: Sequence[Ready], params: Mapping[str, float]) -> list[list[int]]:
        """Buckets, in the order they run, as positions in ``ready``; each position exactly once.

        ``params`` holds at least ``fusion_bytes``; where a whole period is laid out also ``first_bucket_bytes``
        (0: no bound of its own). Ragged kinds never come here.
        """
        ...
