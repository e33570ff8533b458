"""Decides which gradients travel joined and in which order they leave; knows shapes and sizes alone.

An array that crosses from TensorFlow to Python and back costs about 10 µs whatever its size, a join and a split in
TensorFlow's own code about 2 µs a member. So small gradients travel joined along their first dimension: those whose
other dimensions are alike as they are, the rest flattened. What is large travels alone and is never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["MOST_GROUPS", "Bucket", "Look", "cut", "pack"]

MOST_GROUPS = 16  # operations a step that send something off
SMALL_BYTES = 64 << 10  # up to here two copies by TensorFlow cost less than a crossing


@dataclass(frozen=True)
class Look:
    """What is known of a gradient before it has a value. ``shape`` is None where it is not known in full."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """0 where it is not known."""
        return 0 if self.shape is None else prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients, by their places in the list, that travel as one tensor of shape (rows, *inner).

    ``inner`` is None for one that travels alone and as it is.
    """

    members: tuple[int, ...]
    inner: tuple[int, ...] | None = None

    def rows(self, look: Look) -> int:
        """How many rows of the whole are this member's."""
        assert look.shape is not None and self.inner is not None
        return prod(look.shape) if not self.inner else look.shape[0]


def cut(looks: Sequence[Look], places: Sequence[int], first_bytes: float, most_bytes: float) -> list[list[int]]:
    """``places`` parted, in their order, into runs of about ``most_bytes``: MOST_GROUPS at most, the first small.

    ``first_bytes`` 0: the first is like the others.
    """
    total = sum(looks[place].nbytes for place in places)
    most_bytes = max(most_bytes, total / (MOST_GROUPS - 1))
    runs: list[list[int]] = []
    filled, room = 0.0, first_bytes or most_bytes
    for place in places:
        nbytes = looks[place].nbytes
        if not runs or (filled + nbytes > room and len(runs) < MOST_GROUPS):
            room = (first_bytes or most_bytes) if not runs else most_bytes
            runs.append([])
            filled = 0.0
        runs[-1].append(place)
        filled += nbytes
    return runs


def pack(looks: Sequence[Look], places: Sequence[int]) -> list[Bucket]:
    """The buckets in which these gradients leave together."""
    small = {place for place in places if looks[place].shape is not None and looks[place].nbytes <= SMALL_BYTES}
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for place in places:
        if place in small:
            alike.setdefault((looks[place].dtype, (looks[place].shape or ())[1:]), []).append(place)
    joined: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (dtype, inner), members in alike.items():
        empty = 0 in inner  # its rows could not be told from its values
        key = (dtype, inner if len(members) > 1 and not empty else ())
        joined.setdefault(key, []).extend(members)
    buckets = [Bucket((place,)) for place in places if place not in small]
    return buckets + [Bucket(tuple(members), inner) for (_, inner), members in joined.items()]
